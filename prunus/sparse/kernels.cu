// Products of sparse matrices with up to 16 vectors, compiled at their first use by the NVRTC that torch brings.
// TYPE is the type of all numbers, 0: bfloat16, 1: float16, 2: float32; sums are float32.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

template <int TYPE> struct Kind { typedef u16 type; };
template <> struct Kind<2> { typedef float type; };

template <int TYPE> __device__ float low(u32 word) {  // the number in the low half of a word
  if (TYPE == 2) return __uint_as_float(word);
  if (TYPE == 0) return __uint_as_float(word << 16);
  float f;
  asm("{.reg .b16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a;}" : "=f"(f) : "r"(word));
  return f;
}

template <int TYPE> __device__ float high(u32 word) {
  if (TYPE == 0) return __uint_as_float(word & 0xffff0000u);
  float f;
  asm("{.reg .b16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, b;}" : "=f"(f) : "r"(word));
  return f;
}

template <int TYPE> __device__ float number(const typename Kind<TYPE>::type* at) {
  if constexpr (TYPE == 2) return *at;
  else return low<TYPE>(*at);
}

template <int TYPE> __device__ void put(typename Kind<TYPE>::type* at, float f) {
  if constexpr (TYPE == 2) {
    *at = f;
  } else {
    u16 half;
    if (TYPE == 0) asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(f));
    else asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(f));
    *at = half;
  }
}

// start plus the sum of four bytes times four bytes
__device__ u32 dot4(u32 bytes, u32 factors, u32 start) {
  u32 sum;
  asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(sum) : "r"(bytes), "r"(factors), "r"(start));
  return sum;
}

__device__ u32 word_at(u32 shared) {
  u32 word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(shared));
  return word;
}

template <int BYTES> struct Words { u32 w[BYTES > 4 ? BYTES / 4 : 1]; };

template <int BYTES> __device__ Words<BYTES> words_at(u32 shared) {
  Words<BYTES> r;
  if constexpr (BYTES == 2)
    asm volatile("{.reg .u16 a; ld.shared.u16 a, [%1]; cvt.u32.u16 %0, a;}" : "=r"(r.w[0]) : "r"(shared));
  if constexpr (BYTES == 4) r.w[0] = word_at(shared);
  if constexpr (BYTES == 8)
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(r.w[0]), "=r"(r.w[1]) : "r"(shared));
  if constexpr (BYTES == 16)
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.w[0]), "=r"(r.w[1]), "=r"(r.w[2]), "=r"(r.w[3])
                 : "r"(shared));
  return r;
}

__device__ u32 address(const void* shared) { return (u32)__cvta_generic_to_shared(shared); }

// ---- Tiles: 16 rows by 128 columns each, dense again in registers, multiplied by the matrix units -----------------
//
// tiles.py says what a tile holds. A warp takes every WARPS-th tile of 16 rows; the next one is copied to shared memory
// while it computes. Lane 4g + t of a matrix instruction holds rows g and g + 8, so a tile's bits are stored by lane,
// and its values in the order in which the lanes ask for them: a group of 128 values is one element of each lane's four,
// so that neighbours read neighbours. Where a lane's values begin, sums over the lanes say, four groups in a word.

// by one lane, in the background: the barrier opens when the bytes have arrived
__device__ void copy(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
      "r"(bytes), "r"(barrier)
      : "memory");
}

__device__ void wait(u32 barrier, u32 parity) {
  asm volatile(
      "{.reg .pred p; AGAIN: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @!p bra AGAIN;}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// if there is a value here: value = the one at `at`, and `at` goes on to the next
__device__ void take(u32& value, u32& at, u32 is_here) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p ld.shared.u16 %0, [%1]; @p add.u32 %1, %1, 2;}"
               : "+r"(value), "+r"(at)
               : "r"(is_here));
}

template <int TYPE> __device__ void multiply(float* c, const u32* a, u32 b0, u32 b1) {
  if (TYPE == 0)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// of each group of 128 elements the number of values before this lane's, and the number in all: a byte each, of the
// groups of rows 0 to 7 and of rows 8 to 15
struct Places { u32 before[2], all[2]; };

__device__ Places places_of(u32 bits, int lane) {
  u32 count = bits - ((bits >> 1) & 0x55555555u);
  count = (count & 0x33333333u) + ((count >> 2) & 0x33333333u);  // of every four bits
  const u32 own[2] = {count & 0x0f0f0f0fu, (count >> 4) & 0x0f0f0f0fu};
  Places p = {{own[0], own[1]}, {}};
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const u32 a = __shfl_up_sync(~0u, p.before[0], d), b = __shfl_up_sync(~0u, p.before[1], d);
    if (lane >= d) p.before[0] += a, p.before[1] += b;
  }
#pragma unroll
  for (int r = 0; r < 2; r++) p.all[r] = __shfl_sync(~0u, p.before[r], 31), p.before[r] -= own[r];
  return p;
}

// where the lane's values of group j begin, SCALE for each value, if those of its rows begin at `start`
template <int SCALE> __device__ u32 place(const Places& p, int r, int j, u32 start) {
  const u32 below = j == 0 ? 0 : (SCALE * 0x01010101u) >> (32 - 8 * j);
  return dot4(p.before[r], (u32)SCALE << (8 * j), dot4(p.all[r], below, start));
}

// the sums of all warps and the bias, for 16 rows and all vectors; `total` is (warps, 16 rows, vectors), in shared memory
template <int TYPE, int VECTORS, int WARPS>
__device__ void write_sums(const float* sums, float* total, const u16* bias, u16* y, int first, int rows, int vectors) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  __syncthreads();
#pragma unroll
  for (int n = 0; n < VECTORS / 8; n++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      total[(warp * 16 + g + (i >> 1) * 8) * VECTORS + n * 8 + 2 * t + (i & 1)] = sums[n * 4 + i];
  __syncthreads();
  for (int i = threadIdx.x; i < 16 * VECTORS; i += WARPS * 32) {
    const int row = first + (i & 15), vector = i >> 4;
    if (row >= rows || vector >= vectors) continue;
    float sum = bias ? number<TYPE>(bias + row) : 0.f;
    for (int w = 0; w < WARPS; w++) sum += total[(w * 16 + (i & 15)) * VECTORS + vector];
    put<TYPE>(y + (u64)vector * rows + row, sum);
  }
}

// x is (vectors, width), width a multiple of 128; VECTORS is 8 or 16, of which the last ones may be missing
template <int TYPE, int VECTORS, int WARPS>
__global__ void __launch_bounds__(WARPS * 32)
tile_product(const uint4* data, const int* starts, const u16* x, const u16* bias, u16* y, int rows, int width,
             int tiles, int vectors, int stage) {
  extern __shared__ __align__(128) u8 memory[];
  constexpr int N = VECTORS / 8, STAGES = 2, HEAD = 16 * 32;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const u32 barriers = address(memory) + warp * STAGES * 8, ring = address(memory) + HEAD + warp * STAGES * stage;
  if (lane < STAGES) asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(barriers + 8 * lane) : "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();

  starts += (u64)blockIdx.x * tiles + warp;
  int from = 0, end = 0, left = tiles - warp;  // of the tile to copy next
  auto look = [&]() {
    if (left > 0) from = starts[0], end = starts[1];
    starts += WARPS;
  };
  auto fetch = [&](int slot) {
    if (left > 0 && lane == 0) copy(ring + slot * stage, data + from, (end - from) * 16, barriers + 8 * slot);
    left -= WARPS;
    look();
  };
  look();
  fetch(0);

  float sums[N][4] = {};
  const uint4* columns[N];  // what this lane reads of x
#pragma unroll
  for (int n = 0; n < N; n++)
    columns[n] = (const uint4*)(x + (u64)min(n * 8 + g, vectors - 1) * width + warp * 128 + t * 8);
  uint4 b[N][2] = {};
  int slot = 0;
  u32 parity = 0;
  for (int tile = warp; tile < tiles; tile += WARPS) {
    __syncwarp();
    fetch(slot ^ 1);
    wait(barriers + 8 * slot, parity);
    const u32 at = ring + slot * stage;
    u32 start = at + 256;
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int n = 0; n < N; n++)
        if (n * 8 + g < vectors)
#pragma unroll
          for (int i = 0; i < 2; i++) b[n][i] = columns[n][half * 8 + i * 4];
      const u32 bits = word_at(at + lane * 8 + half * 4);
      const Places p = places_of(bits, lane);
      const u32 starts2[2] = {start, dot4(p.all[0], 0x02020202u, start)};
      start = dot4(p.all[1], 0x02020202u, starts2[1]);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        u32 a[4];
#pragma unroll
        for (int r = 0; r < 2; r++) {
          u32 q = place<2>(p, r, j, starts2[r]), v[4] = {};
#pragma unroll
          for (int e = 0; e < 4; e++) take(v[e], q, bits & (1u << (4 * (2 * j + r) + e)));
          a[r] = __byte_perm(v[0], v[1], 0x5410);
          a[r + 2] = __byte_perm(v[2], v[3], 0x5410);
        }
#pragma unroll
        for (int n = 0; n < N; n++) {
          const uint4 w = b[n][j >> 1];
          multiply<TYPE>(sums[n], a, j & 1 ? w.z : w.x, j & 1 ? w.w : w.y);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < N; n++) columns[n] += WARPS * 16;
    slot ^= 1;
    parity ^= slot == 0;
  }

  write_sums<TYPE, VECTORS, WARPS>(&sums[0][0], (float*)(memory + HEAD), bias, y, blockIdx.x * 16, rows, vectors);
}

// eight neighbouring numbers of a row, from a column that is a multiple of eight
template <typename T> __device__ void put_eight(T* to, const T* v, int column, int width) {
  if (sizeof(T) == 2 && width % 8 == 0 && column < width)
    *(uint4*)to = make_uint4((u32)v[0] | (u32)v[1] << 16, (u32)v[2] | (u32)v[3] << 16, (u32)v[4] | (u32)v[5] << 16,
                             (u32)v[6] | (u32)v[7] << 16);
  else
    for (int e = 0; e < 8; e++) if (column + e < width) to[e] = v[e];
}

// the matrix with its zeros, a warp for each tile
__global__ void __launch_bounds__(256)
tile_dense(const uint4* data, const int* starts, u16* out, int rows, int width, int tiles, int num_tiles) {
  const int lane = threadIdx.x & 31, tile = blockIdx.x * 8 + (threadIdx.x >> 5), g = lane >> 2, t = lane & 3;
  if (tile >= num_tiles) return;
  const uint4* from = data + starts[tile];
  const uint2 words = ((const uint2*)from)[lane];
  const u16* values = (const u16*)(from + 16);
  u32 start = 0;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const u32 bits = half ? words.y : words.x;
    const Places p = places_of(bits, lane);
    const u32 starts2[2] = {start, dot4(p.all[0], 0x01010101u, start)};
    start = dot4(p.all[1], 0x01010101u, starts2[1]);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int r = i & 1, row = tile / tiles * 16 + g + 8 * r;
      const int column = tile % tiles * 128 + 64 * half + 32 * (i >> 1) + 8 * t;
      u16 v[8];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int j = 2 * (i >> 1) + h;
        u32 q = place<1>(p, r, j, starts2[r]);
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const bool is_here = bits >> (4 * (2 * j + r) + e) & 1;
          v[4 * h + e] = is_here ? values[q] : 0;
          q += is_here;
        }
      }
      if (row < rows) put_eight(out + (u64)row * width + column, v, column, width);
    }
  }
}

// ---- Coded tiles: 4-bit codes and a scale for each row of a tile -----------------------------------------------------
//
// coded_tiles.py says what a tile holds. A number of A is 16 + c (bfloat16) or 64 + c (float16), and for a pruned weight
// 16 + 7.5 or 64 + 7.5: all are too large by the same middle, which a second matrix instruction takes off. So nothing is
// selected: the four bits of a lane's four columns say which bytes of the codes a permutation puts where.

template <int TYPE> struct Code {  // bfloat16: codes are bits 3 to 6 of the low byte
  static constexpr u32 LEFT = 3, RIGHT = 1, BITS = 0x78787878u, SET = 0x80808080u, MIDDLE = 0x41bcu, MINUS = 0xc1bcc1bcu;
};
template <> struct Code<1> {  // float16: bits 4 to 7
  static constexpr u32 LEFT = 4, RIGHT = 0, BITS = 0xf0f0f0f0u, SET = 0, MIDDLE = 0x5478u, MINUS = 0xd478d478u;
};

// the word itself, of lane `lane`: the compiler computes what it could compute again, but keeps what is shuffled
__device__ u32 kept(u32 word, int lane) { return __shfl_sync(~0u, word, lane); }

__device__ u32 and_or(u32 a, u32 b, u32 c) {
  u32 r;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}

__device__ u32 permute(u32 a, u32 b, u32 selector) {  // by its low half
  u32 r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
  return r;
}

// the bytes for four columns, where the nibbles of `places` are the bytes of the codes 0 to 3
__device__ u32 selector(u32 bits, u32 places, u32 middle_low, u32 middle_high) {
  u32 s = 0;
  for (int e = 0; e < 4; e++) {
    const bool is_here = bits >> e & 1;
    s |= ((is_here ? places & 15 : middle_low) | middle_high << 4) << (8 * e);
    if (is_here) places >>= 4;
  }
  return s;
}

// the number of a lane's codes before the middle of pair j, in this half
__device__ u32 before_middle(u32 bits, int j) { return __popc(bits & (0xfffffff >> (24 - 8 * j))); }

// that between the middles of pairs j and j + 1
__device__ u32 num_between(u32 bits, int j) { return __popc(bits & (0xff0u << (8 * j))); }

// the number of codes before this lane's, of each half, and that of all
__device__ uint3 codes_before(u32 bits0, u32 bits1) {
  const u32 own = __popc(bits0) | __popc(bits1) << 16;
  u32 sum = own;
#pragma unroll
  for (int d = 1; d < 32; d *= 2)
    asm volatile("{.reg .pred p; .reg .u32 r; shfl.sync.up.b32 r|p, %0, %1, 0, -1; @p add.u32 %0, %0, r;}"
                 : "+r"(sum)
                 : "r"(d));
  const u32 all = __shfl_sync(~0u, sum, 31);
  sum -= own;
  return make_uint3(sum & 0xffff, (all & 0xffff) + (sum >> 16), (all & 0xffff) + (all >> 16));
}

// a warp copies GROUP neighbouring tiles at a time, and has STAGES such copies in shared memory, or on their way: those
// of the next 16 rows of its block too, so that it does not wait for them
template <int TYPE, int VECTORS, int WARPS, int STAGES, int GROUP>
__global__ void __launch_bounds__(WARPS * 32)
coded_product(const uint4* data, const int* starts, const u16* x, const u16* bias, u16* y, int rows, int width,
              int tiles, int vectors, int stage) {
  extern __shared__ __align__(128) u8 memory[];
  typedef Code<TYPE> C;
  constexpr int N = VECTORS / 8, HEAD = 512, SUMS = WARPS * 16 * VECTORS * 4, STEP = WARPS * GROUP;
  constexpr u32 UP = 0xffffu, DOWN = 0xffff0000u;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3, size = GROUP * stage;
  const u32 barriers = address(memory) + warp * STAGES * 8, ring = address(memory) + HEAD + SUMS + warp * STAGES * size;
  if (lane < STAGES) asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(barriers + 8 * lane) : "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();

  const int blocks = (rows + 15) / 16, each = max(0, (tiles - warp * GROUP + STEP - 1) / STEP);  // groups in 16 rows
  const int all = each * ((blocks - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x);
  const uint4* from = data;  // each lane knows one of the next 32 groups of the warp, and copies it
  int bytes = 0, asked = 0;
  auto fetch = [&](int slot) {
    if (asked % 32 == 0) {
      const int group = asked + lane;
      bytes = 0;
      if (group < all) {
        const int tile = warp * GROUP + group % each * STEP;
        const int* its = starts + (u64)(blockIdx.x + group / each * gridDim.x) * tiles + tile;
        from = data + its[0], bytes = (its[min(GROUP, tiles - tile)] - its[0]) * 16;
      }
    }
    if (lane == asked % 32 && bytes) copy(ring + slot * size, from, bytes, barriers + 8 * slot);
    asked++;
  };
#pragma unroll
  for (int slot = 0; slot < STAGES - 1; slot++) fetch(slot);

  const u32 above = kept(selector(lane & 15, 0x0415, 2, 3), lane), below = kept(selector(lane & 15, 0x7362, 0, 1), lane);
  const u32 none = vectors >> 31;  // 0, which the compiler does not know: it keeps what it is part of in registers
  const u32 minus[4] = {C::MINUS | none, C::MINUS + (none & 1), C::MINUS - (none & 2), C::MINUS ^ (none & 4)};
  const u32 upper_set = ((C::SET & UP) | C::MIDDLE << 16) ^ none, lower_set = ((C::SET & DOWN) | C::MIDDLE) ^ none;
  const u32 set = C::SET ^ none;
  const uint4* columns[N];  // what this lane reads of x
#pragma unroll
  for (int n = 0; n < N; n++)
    columns[n] = (const uint4*)(x + (u64)min(n * 8 + g, vectors - 1) * width + warp * GROUP * 128 + t * 8);
  uint4 b[N][4] = {};
  int slot = 0;
  u32 parity = 0;
  for (int block = blockIdx.x; block < blocks; block += gridDim.x) {
    float sums[N][4] = {};
    for (int first = warp * GROUP; first < tiles; first += STEP) {
      __syncwarp();
      fetch(slot ? slot - 1 : STAGES - 1);
      wait(barriers + 8 * slot, parity);
      u32 at = ring + slot * size;
      const int last = min(first + GROUP, tiles);
      const uint4* here[N];
#pragma unroll
      for (int n = 0; n < N; n++) here[n] = columns[n], columns[n] += STEP * 16;
#pragma unroll 1
      for (int tile = first; tile < last; tile++) {
#pragma unroll
        for (int n = 0; n < N; n++) {
          if (n * 8 + g < vectors)
#pragma unroll
            for (int i = 0; i < 4; i++) b[n][i] = here[n][i * 4];
          here[n] += 16;
        }
        const u32 scales = word_at(at + 256 + 4 * g);
        const Words<8> own = words_at<8>(at + lane * 8);
        const uint3 before = codes_before(own.w[0], own.w[1]);
        float part[N][4] = {};
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const u32 bits = own.w[half], start = (at + 288) * 8 - 16 + (half ? before.y : before.x) * 4;
          u32 z[4], s0[4], s1[4];  // codes around the middle of each pair, and where the bytes of its two rows are
#pragma unroll
          for (int j = 0; j < 4; j += 2) {  // the next middle is at most 8 codes further on
            const u32 q = start + before_middle(bits, j) * 4, from = (q >> 3) & ~3u, next = word_at(from + 4);
            z[j] = __funnelshift_r(word_at(from), next, q);
            z[j + 1] = __funnelshift_rc(z[j], __funnelshift_r(next, word_at(from + 8), q), num_between(bits, j) * 4);
          }
#pragma unroll
          for (int j = 0; j < 4; j++) {
            s0[j] = __shfl_sync(~0u, above, bits >> (8 * j));
            s1[j] = __shfl_sync(~0u, below, bits >> (8 * j + 4));
          }
#pragma unroll
          for (int j = 0; j < 4; j++) {
            const u32 even = z[j] << C::LEFT, odds = and_or(z[j] >> C::RIGHT, C::BITS, set);
            const u32 even0 = and_or(even, C::BITS & UP, upper_set), even1 = and_or(even, C::BITS & DOWN, lower_set);
            const u32 a[4] = {permute(even0, odds, s0[j]), permute(even1, odds, s1[j]),
                              permute(even0, odds, s0[j] >> 16), permute(even1, odds, s1[j] >> 16)};
#pragma unroll
            for (int n = 0; n < N; n++) {
              const uint4 w = b[n][2 * half + (j >> 1)];
              multiply<TYPE>(part[n], minus, j & 1 ? w.z : w.x, j & 1 ? w.w : w.y);
              multiply<TYPE>(part[n], a, j & 1 ? w.z : w.x, j & 1 ? w.w : w.y);
            }
          }
        }
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
          for (int i = 0; i < 4; i++) sums[n][i] += part[n][i] * (i < 2 ? low<0>(scales) : high<0>(scales));
        at += 288 + (before.z + 31) / 32 * 16;
      }
      if (++slot == STAGES) slot = 0, parity ^= 1;
    }
#pragma unroll
    for (int n = 0; n < N; n++) columns[n] -= each * STEP * 16;
    write_sums<TYPE, VECTORS, WARPS>(&sums[0][0], (float*)(memory + HEAD), bias, y, block * 16, rows, vectors);
  }
}

// the matrix with its zeros, a warp for each tile
template <int TYPE>
__global__ void __launch_bounds__(256)
coded_dense(const uint4* data, const int* starts, typename Kind<TYPE>::type* out, int rows, int width, int tiles,
            int num_tiles) {
  const int lane = threadIdx.x & 31, tile = blockIdx.x * 8 + (threadIdx.x >> 5), g = lane >> 2, t = lane & 3;
  if (tile >= num_tiles) return;
  const uint4* from = data + starts[tile];
  const uint2 words = ((const uint2*)from)[lane];
  const u32 scales = ((const u32*)(from + 16))[g], *codes = (const u32*)(from + 18);
  const uint3 before = codes_before(words.x, words.y);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const u32 bits = half ? words.y : words.x;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int r = i & 1, row = tile / tiles * 16 + g + 8 * r;
      const int column = tile % tiles * 128 + 64 * half + 32 * (i >> 1) + 8 * t;
      const float scale = r ? high<0>(scales) : low<0>(scales);
      typename Kind<TYPE>::type v[8];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int j = 2 * (i >> 1) + h, middle = ((half ? before.y : before.x) + before_middle(bits, j)) * 4;
        int place = r ? middle : middle - 4;
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const bool is_here = bits >> (8 * j + 4 * r + e) & 1;
          const u32 code = is_here ? codes[place >> 5] >> (place & 31) & 15 : 0;
          put<TYPE>(v + 4 * h + e, is_here ? scale * (code - 7.5f) : 0.f);
          if (is_here) place += r ? 4 : -4;
        }
      }
      if (row < rows) put_eight(out + (u64)row * width + column, v, column, width);
    }
  }
}

// ---- Coded gaps: a lane computes 128 columns of a row, with all of x in shared memory --------------------------------
//
// coded_gaps.py says what a tile holds. The 128 columns of x that a lane reads begin 16 banks after those that the lanes
// of the other half read. An entry's byte v << 3 in the middle of the float 4096 makes it 4096 + v.

// bytes from the columns of one group, of BYTES each, to the next ones; entries that are nothing read up to 128 columns
// behind their group
template <int BYTES> struct Groups { static constexpr int STRIDE = 128 * BYTES + 64, BEHIND = 128 * BYTES; };

// sums plus a word's four entries; the first is `offset` columns and its step after `at`. Returns `at` plus the steps.
// `magic` has the bits of 4096
template <int TYPE, int SIZE, int N> __device__ u32 add_word(float* sums, u32 word, u32 at, int offset, u32 magic) {
  constexpr int BYTES = N * SIZE;
  const u32 steps = word & 0x07070707u, values = word & 0xf8f8f8f8u;
  u32 here = at;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    here = dot4(steps, (BYTES * 0x01010101u) >> (24 - 8 * i), at);
    const Words<BYTES> numbers = words_at<BYTES>(here + (offset + i) * BYTES);
    const float value = __uint_as_float(__byte_perm(values, magic, 0x7604 + 16 * i)) - 4111.f;
#pragma unroll
    for (int n = 0; n < N; n++) {
      if constexpr (SIZE == 4) sums[n] += value * __uint_as_float(numbers.w[n]);
      else sums[n] += value * (n % 2 ? high<TYPE>(numbers.w[n / 2]) : low<TYPE>(numbers.w[n / 2]));
    }
  }
  return here;
}

// x, (N, width), to shared memory as numbers of SIZE bytes, a column's N side by side, with zeros between and behind
// groups; of each thread BATCH reads are on their way at a time
template <int TYPE, int SIZE, int N, int THREADS>
__device__ void put_columns(u8* memory, const typename Kind<TYPE>::type* x, int width, int groups) {
  typedef typename Kind<TYPE>::type T;
  constexpr int BYTES = N * SIZE, STRIDE = Groups<BYTES>::STRIDE, BEHIND = Groups<BYTES>::BEHIND;
  constexpr int EACH = 16 / sizeof(T), BATCH = 4;
  auto place = [&](int k) { return memory + (k >> 7) * STRIDE + (k & 127) * BYTES; };
  if (N == 1 && width % EACH == 0) {
    for (int first = threadIdx.x * EACH; first < groups * 128; first += BATCH * THREADS * EACH) {
      uint4 w[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; i++) {
        const int k = first + i * THREADS * EACH;
        w[i] = k < width ? *(const uint4*)(x + k) : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int i = 0; i < BATCH; i++) {
        const int k = first + i * THREADS * EACH;
        if (k >= groups * 128) break;
        if constexpr (SIZE == sizeof(T)) {
          *(uint4*)place(k) = w[i];
        } else {
          float4* to = (float4*)place(k);
          to[0] = make_float4(low<TYPE>(w[i].x), high<TYPE>(w[i].x), low<TYPE>(w[i].y), high<TYPE>(w[i].y));
          to[1] = make_float4(low<TYPE>(w[i].z), high<TYPE>(w[i].z), low<TYPE>(w[i].w), high<TYPE>(w[i].w));
        }
      }
    }
  } else {
    for (int first = threadIdx.x; first < groups * 128; first += BATCH * THREADS) {
      T numbers[BATCH][N];
#pragma unroll
      for (int i = 0; i < BATCH; i++)
#pragma unroll
        for (int n = 0; n < N; n++) {
          const int k = first + i * THREADS;
          numbers[i][n] = k < width ? x[(u64)n * width + k] : 0;
        }
#pragma unroll
      for (int i = 0; i < BATCH; i++) {
        const int k = first + i * THREADS;
        if (k >= groups * 128) break;
#pragma unroll
        for (int n = 0; n < N; n++) {
          if constexpr (SIZE == sizeof(T)) ((T*)place(k))[n] = numbers[i][n];
          else ((float*)place(k))[n] = low<TYPE>(numbers[i][n]);
        }
      }
    }
  }
  for (int k = threadIdx.x; k < groups * 16; k += THREADS)
    *(u32*)(memory + (k >> 4) * STRIDE + 128 * BYTES + (k & 15) * 4) = 0;
  for (int k = threadIdx.x; k < BEHIND / 4; k += THREADS) *(u32*)(memory + groups * STRIDE + 4 * k) = 0;
}

// a block computes 16 rows after another, and a warp some neighbouring tiles of them, whose data is in one piece; AHEAD
// words of each lane are on their way, also of the next 16 rows. SIZE is the bytes of a number of x in shared memory:
// those of its type or, as float32, 4. x is (N, width), and begins at a multiple of 16 bytes
template <int TYPE, int SIZE, int N, int WARPS, int AHEAD>
__global__ void __launch_bounds__(WARPS * 32, WARPS > 16 ? 2 : 1)
coded_gap_product(const u32* data, const int* starts, const typename Kind<TYPE>::type* x,
                  const typename Kind<TYPE>::type* bias, typename Kind<TYPE>::type* y, int rows, int width, int tiles) {
  extern __shared__ __align__(128) u8 memory[];
  constexpr int BYTES = N * SIZE, STRIDE = Groups<BYTES>::STRIDE, SUMS = WARPS * 16 * N, HEAD = 2 * SUMS * 4;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, blocks = (rows + 15) / 16;
  const int first = warp * tiles / WARPS, last = (warp + 1) * tiles / WARPS;
  const u32 magic = 0x45800000u ^ (u32)(rows >> 31);  // which the compiler does not know, so that it is in a register
  int begin = 0, end = 0;  // the warp's tiles of the next 16 rows
  auto look = [&](int block) {
    begin = block < blocks ? starts[(u64)block * tiles + first] : 0;
    end = block < blocks ? starts[(u64)block * tiles + last] : 0;
  };
  const u32* from = data;
  int rest = 0;  // words of each lane from here to the end of the last tile
  auto enter = [&]() { from = data + (u64)begin * 4 + lane, rest = (end - begin) / 8; };
  u32 head = 0, next[AHEAD] = {};
  look(blockIdx.x), enter();
  if (rest > 0) head = __ldcs(from);
#pragma unroll
  for (int i = 0; i < AHEAD; i++)
    if (1 + i < rest) next[i] = __ldcs(from + 32 + 32 * i);
  look(blockIdx.x + gridDim.x);
  put_columns<TYPE, SIZE, N, WARPS * 32>(memory + HEAD, x, width, 2 * tiles);
  __syncthreads();

  float* total = (float*)memory;  // (warps, 16 rows, vectors), twice: one is read while the other is written
  for (int block = blockIdx.x; block < blocks; block += gridDim.x) {
    float sums[N] = {};
    u32 columns = address(memory) + HEAD + (2 * first + (lane >> 4)) * STRIDE;
    for (int tile = first; tile < last; tile++) {
      const float scale = high<0>(head) * .5f;
      float part[N] = {};
      u32 column = columns;
      int left = head & 0xffff;  // words
      from += 32;
      rest -= left + 1;
      auto add = [&](int coming) {  // the words that are there, each followed by one of those to come
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
          const u32 word = next[i];
          if (i < coming) next[i] = __ldcs(from + 32 * (AHEAD + i));
          column = add_word<TYPE, SIZE, N>(part, word, column, 4 * i, magic);
        }
        from += 32 * AHEAD, left -= AHEAD, column += 4 * AHEAD * BYTES;
      };
      while (left >= 2 * AHEAD) add(AHEAD);
      if (left > AHEAD) add(left - AHEAD);
      from += 32 * left;  // to the next tile
      if (tile + 1 == last) enter(), look(block + 2 * gridDim.x);
      if (rest > 0) head = __ldcs(from);
#pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        const u32 word = next[i];
        if (1 + i < rest) next[i] = __ldcs(from + 32 + 32 * i);
        if (i < left) column = add_word<TYPE, SIZE, N>(part, word, column, 4 * i, magic);
      }
#pragma unroll
      for (int n = 0; n < N; n++) sums[n] += part[n] * scale;
      columns += 2 * STRIDE;
    }
#pragma unroll
    for (int n = 0; n < N; n++) {
      sums[n] += __shfl_xor_sync(~0u, sums[n], 16);
      if (lane < 16) total[(warp * 16 + lane) * N + n] = sums[n];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 16 * N; i += WARPS * 32) {
      const int row = block * 16 + (i & 15), vector = i >> 4;
      if (row >= rows) continue;
      float sum = bias ? number<TYPE>(bias + row) : 0.f;
      for (int w = 0; w < WARPS; w++) sum += total[(w * 16 + (i & 15)) * N + vector];
      put<TYPE>(y + (u64)vector * rows + row, sum);
    }
    total = (float*)memory + (total == (float*)memory ? SUMS : 0);
  }
}

// the matrix with its zeros, a warp for each tile, which is in shared memory before it is written
template <int TYPE, int WARPS>
__global__ void __launch_bounds__(WARPS * 32)
coded_gap_dense(const u32* data, const int* starts, typename Kind<TYPE>::type* out, int rows, int width, int tiles,
                int num_tiles) {
  typedef typename Kind<TYPE>::type T;
  extern __shared__ __align__(128) u8 memory[];
  constexpr int WIDE = 256 + 8, QUADS = 16 * WIDE * sizeof(T) / 16;
  const int lane = threadIdx.x & 31, tile = blockIdx.x * WARPS + (threadIdx.x >> 5);
  if (tile >= num_tiles) return;
  uint4* quad = (uint4*)memory + (threadIdx.x >> 5) * QUADS;
  T* matrix = (T*)quad;
  for (int k = lane; k < QUADS; k += 32) quad[k] = make_uint4(0, 0, 0, 0);
  __syncwarp();
  data += (u64)starts[tile] * 4 + lane;
  const u32 head = data[0];
  const float scale = high<0>(head) * .5f;
  T* mine = matrix + (lane & 15) * WIDE + (lane >> 4) * 128 - 1;
  for (int k = head & 0xffff; k; k--) {
    data += 32;
    const u32 word = __ldcs(data);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int value = word >> (8 * i + 3) & 31;
      mine += (word >> (8 * i) & 7) + 1;
      if (value != 15) put<TYPE>(mine, scale * (value - 15));
    }
  }
  __syncwarp();
#pragma unroll
  for (int r = 0; r < 16; r++) {
    const int row = tile / tiles * 16 + r, column = tile % tiles * 256 + lane * 8;
    if (row < rows) put_eight(out + (u64)row * width + column, matrix + r * WIDE + lane * 8, column, width);
  }
}

// ---- Gaps: a warp computes a row, with all of x in shared memory -----------------------------------------------------
//
// gaps.py says what a block holds; _triton.py has the same product for one vector, which reads x from the L1 cache.
// With more vectors those reads are what takes the time: of shared memory, where a column's N numbers lie side by
// side, they take half of it.

template <int TYPE> struct Block { uint4 values[TYPE == 2 ? 2 : 1]; u32 codes, heads; };

template <int TYPE> __device__ u32 word_of(const Block<TYPE>& block, int i) {  // the one that has number i
  const uint4 v = block.values[TYPE == 2 ? i / 4 : 0];
  const int k = TYPE == 2 ? i % 4 : i / 2;
  return k == 0 ? v.x : k == 1 ? v.y : k == 2 ? v.z : v.w;
}

template <int TYPE> __device__ float value_of(const Block<TYPE>& block, int i) {
  const u32 word = word_of(block, i);
  return TYPE != 2 && i % 2 ? high<TYPE>(word) : low<TYPE>(word);
}

__device__ void put_bits(float* at, u32 word, int i) { *at = __uint_as_float(word); }
__device__ void put_bits(u16* at, u32 word, int i) { *at = i % 2 ? word >> 16 : word & 0xffff; }

// the columns before a lane's two runs, in the halves of a word
__device__ u32 starts_of(const u32* steps, u32 heads, int lane) {
  const u32 own = dot4(steps[0], 0x01010101u, 0) | dot4(steps[1], 0x01010101u, 0) << 16;
  u32 sum = own;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const u32 other = __shfl_up_sync(~0u, sum, d);
    if (lane >= d) sum += other;
  }
  return sum + heads - own;
}

template <int TYPE, int N> __device__ void add(float* sums, const Block<TYPE>& block, u32 x, int lane) {
  constexpr int BYTES = N * sizeof(typename Kind<TYPE>::type);
  const u32 steps[2] = {block.codes & 0x0f0f0f0fu, (block.codes >> 4) & 0x0f0f0f0fu};
  const u32 sum = starts_of(steps, block.heads, lane);
#pragma unroll
  for (int run = 0; run < 2; run++) {
    const u32 start = x + (run ? sum >> 16 : sum & 0xffff) * BYTES;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const Words<BYTES> numbers = words_at<BYTES>(dot4(steps[run], (BYTES * 0x01010101u) >> (24 - 8 * i), start));
      const float value = value_of<TYPE>(block, run * 4 + i);
#pragma unroll
      for (int n = 0; n < N; n++) {
        if constexpr (TYPE == 2) sums[n] += value * __uint_as_float(numbers.w[n]);
        else sums[n] += value * (n % 2 ? high<TYPE>(numbers.w[n / 2]) : low<TYPE>(numbers.w[n / 2]));
      }
    }
  }
}

// x is (N, width)
template <int TYPE, int N, int WARPS>
__global__ void __launch_bounds__(WARPS * 32)
gap_product(const uint4* values, const u32* codes, const u32* heads, const int* table,
            const typename Kind<TYPE>::type* x, const typename Kind<TYPE>::type* bias,
            typename Kind<TYPE>::type* y, int rows, int width) {
  typedef typename Kind<TYPE>::type T;
  extern __shared__ __align__(16) u8 memory[];
  constexpr int AHEAD = 2, PARTS = TYPE == 2 ? 2 : 1;
  const int lane = threadIdx.x & 31, step = gridDim.x * WARPS;
  int row = blockIdx.x + gridDim.x * (threadIdx.x >> 5);
  int unit = 0, end = 0, block = 0, last = 0, coming[4] = {};  // of the row that blocks are fetched from, and the next
  auto look = [&](int row) {
    const int* r = table + 3 * row;
    if (row < rows) coming[0] = r[0], coming[1] = r[1], coming[2] = r[3], coming[3] = r[4];
    else coming[0] = coming[1] = coming[2] = coming[3] = 0;
  };
  auto begin = [&]() { unit = coming[0], block = coming[1], end = coming[2], last = coming[3]; };
  auto fetch = [&](Block<TYPE>& b) {
    const bool is_unit = unit + lane < end;
#pragma unroll
    for (int i = 0; i < PARTS; i++)
      b.values[i] = is_unit ? __ldcs(values + (u64)(unit + lane) * PARTS + i) : make_uint4(0, 0, 0, 0);
    b.codes = is_unit ? __ldcs(codes + unit + lane) : 0;
    b.heads = block < last ? heads[block] : 0;
    unit += 32, block++;
  };
  look(row), begin(), look(row + step);
  int num = last - block;
  Block<TYPE> next[AHEAD];
#pragma unroll
  for (int i = 0; i < AHEAD; i++) fetch(next[i]);
  for (int k = threadIdx.x; k < width; k += WARPS * 32) {
    T numbers[N];
#pragma unroll
    for (int n = 0; n < N; n++) numbers[n] = x[(u64)n * width + k];
#pragma unroll
    for (int n = 0; n < N; n++) ((T*)memory)[k * N + n] = numbers[n];
  }
  __syncthreads();

  for (; row < rows; row += step) {
    float sums[N] = {};
    const int blocks = num;
    int at = 0;
    do {
      Block<TYPE> here[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; i++) here[i] = next[i];
      if (at + AHEAD >= blocks) begin(), num = last - block, look(row + 2 * step);
#pragma unroll
      for (int i = 0; i < AHEAD; i++) fetch(next[i]);
#pragma unroll
      for (int i = 0; i < AHEAD; i++)
        if (at + i < blocks) add<TYPE, N>(sums, here[i], address(memory), lane);
      at += AHEAD;
    } while (at < blocks);
    int vector = 0, left = N;  // over the lanes: halves are exchanged until each lane has one vector
#pragma unroll
    for (int d = 16; d; d /= 2) {
      if (left > 1) {
        left /= 2;
        const bool is_upper = lane & d;
#pragma unroll
        for (int n = 0; n < N / 2; n++)
          if (n < left) {
            const float gives = is_upper ? sums[n] : sums[n + left], keeps = is_upper ? sums[n + left] : sums[n];
            sums[n] = keeps + __shfl_xor_sync(~0u, gives, d);
          }
        vector = vector * 2 + is_upper;
      } else {
        sums[0] += __shfl_xor_sync(~0u, sums[0], d);
      }
    }
    if (lane % (32 / N) == 0) put<TYPE>(y + (u64)vector * rows + row, sums[0] + (bias ? number<TYPE>(bias + row) : 0.f));
  }
}

// the matrix with its zeros, a row at a time in shared memory, from where it is written in whole lines
template <int TYPE, int WARPS>
__global__ void __launch_bounds__(WARPS * 32)
gap_dense(const uint4* values, const u32* codes, const u32* heads, const int* table, typename Kind<TYPE>::type* out,
          int rows, int width) {
  typedef typename Kind<TYPE>::type T;
  extern __shared__ __align__(16) u8 memory[];
  constexpr int PARTS = TYPE == 2 ? 2 : 1, EACH = 16 / sizeof(T);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quads = (width + EACH - 1) / EACH;
  uint4* quad = (uint4*)memory;
  T* number = (T*)memory;
  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    for (int k = threadIdx.x; k < quads; k += WARPS * 32) quad[k] = make_uint4(0, 0, 0, 0);
    const int unit = table[3 * row], block = table[3 * row + 1], count = table[3 * row + 2];
    __syncthreads();
    for (int k = warp; k * 256 < count; k += WARPS) {
      const int left = count - k * 256, lanes = min((left + 7) / 8, 32);
      const u64 at = (u64)unit + k * 32 + lane;
      Block<TYPE> b = {};
      if (lane < lanes) {
#pragma unroll
        for (int i = 0; i < PARTS; i++) b.values[i] = __ldcs(values + at * PARTS + i);
        b.codes = __ldcs(codes + at);
      }
      const u32 steps[2] = {b.codes & 0x0f0f0f0fu, (b.codes >> 4) & 0x0f0f0f0fu};
      const u32 sum = starts_of(steps, heads[block + k], lane);
#pragma unroll
      for (int run = 0; run < 2; run++) {
        u32 column = run ? sum >> 16 : sum & 0xffff;
#pragma unroll
        for (int i = 0; i < 4; i++) {
          column += steps[run] >> (8 * i) & 15;
          if (lane < lanes && 4 * (run * lanes + lane) + i < left) put_bits(number + column, word_of(b, run * 4 + i), i);
        }
      }
    }
    __syncthreads();
    T* to = out + (u64)row * width;
    if (width % EACH == 0)
      for (int k = threadIdx.x; k < quads; k += WARPS * 32) ((uint4*)to)[k] = quad[k];
    else
      for (int k = threadIdx.x; k < width; k += WARPS * 32) to[k] = number[k];
    __syncthreads();
  }
}
