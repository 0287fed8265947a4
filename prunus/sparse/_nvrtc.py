"""CUDA kernels compiled at their first use by the NVRTC that torch brings, and launched by the driver."""

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).with_name("kernels.cu")
MOST_SHARED = 8  # the driver's number of the attribute "largest dynamic shared memory"


class Kernel:
    """A kernel of ``kernels.cu`` on one device."""

    def __init__(self, name: str, device: int) -> None:
        self.driver, self.name, self.device = _driver(), name, device
        self.stream_of = torch._C._cuda_getCurrentRawStream  # torch.cuda.current_stream makes an object each time
        major, minor = torch.cuda.get_device_capability(device)
        binary, symbol = _compiled(name, f"sm_{major}{minor}")
        module, self.function, self.context = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # there is a context from here on
            self.check(self.driver.cuCtxGetCurrent(ctypes.byref(self.context)))
            self.check(self.driver.cuModuleLoadData(ctypes.byref(module), binary))
            self.check(self.driver.cuModuleGetFunction(ctypes.byref(self.function), module, symbol))
            self.most_shared = most_shared(device)
            self.check(self.driver.cuFuncSetAttribute(self.function, MOST_SHARED, self.most_shared))
        self._blocks: dict[tuple[int, int], int] = {}

    def __call__(self, grid: int, threads: int, shared: int, args: Sequence[int]) -> None:
        """Launch it once on the current stream; tensors are given as their addresses, None as 0."""
        Launch(self, grid, threads, shared, args)()

    def resident(self, threads: int, shared: int) -> int:
        """Blocks of such a launch that run at the same time on the whole device."""
        if (threads, shared) not in self._blocks:
            num, size = ctypes.c_int(), ctypes.c_size_t(shared)
            with self.current():
                count = self.driver.cuOccupancyMaxActiveBlocksPerMultiprocessor
                self.check(count(ctypes.byref(num), self.function, threads, size))
            processors = torch.cuda.get_device_properties(self.device).multi_processor_count
            self._blocks[threads, shared] = max(1, num.value) * processors
        return self._blocks[threads, shared]

    @contextmanager
    def current(self) -> Iterator[None]:
        """The driver works on its device; else on that of the thread, which may be another, or none in backward's."""
        self.check(self.driver.cuCtxPushCurrent_v2(self.context))
        try:
            yield
        finally:
            self.driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def check(self, code: int) -> None:
        if code:
            text = ctypes.c_char_p()
            self.driver.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"the kernel {self.name} failed: {(text.value or b'unknown error').decode()}")


class Config(ctypes.Structure):
    """The driver's ``CUlaunchConfig``."""

    _fields_ = [
        *((f"{of}_{axis}", ctypes.c_uint) for of in ("grid", "block") for axis in "xyz"),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    ]


class Launch(threading.local):
    """A launch that is prepared but for the arguments at ``given``, which each thread has apart, and the stream."""

    def __init__(
        self, kernel: Kernel, grid: int, threads: int, shared: int, args: Sequence[int], given: slice = slice(0)
    ) -> None:
        cells = (ctypes.c_uint64 * len(args))(*args)  # of which a kernel reads as much as it needs
        first = ctypes.addressof(cells)
        pointers = (ctypes.c_void_p * len(args))(*range(first, first + ctypes.sizeof(cells), 8))
        config = Config(grid, 1, 1, threads, 1, 1, shared)
        addresses = ctypes.addressof(config), kernel.function.value, ctypes.addressof(pointers), None
        self.memory = kernel, cells, given, pointers, config, addresses

    def __call__(self, *values: int) -> None:
        """Launch it on the current stream with these values of the given arguments."""
        kernel, cells, given, _, config, addresses = self.memory
        cells[given] = values
        config.stream = kernel.stream_of(kernel.device)
        if kernel.driver.cuLaunchKernelEx(*addresses):
            with kernel.current():
                kernel.check(kernel.driver.cuLaunchKernelEx(*addresses))


@cache
def kernel(name: str, device: int) -> Kernel:
    """The kernel by its name in C++, as ``gap_product<0, 2, 32>``."""
    return Kernel(name, device)


@cache
def most_shared(device: int) -> int:
    """Bytes of shared memory that a block of threads can have."""
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin


@cache
def is_there() -> bool:
    """Whether kernels can be compiled here."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return False
    try:
        _driver()
        _compiler()
    except (OSError, AttributeError):  # an old driver lacks what launches the kernels
        return False
    return True


@cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    return library


@cache
def _compiler() -> ctypes.CDLL:
    for name in (f"libnvrtc.so.{str(torch.version.cuda).partition('.')[0]}", "libnvrtc.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise OSError("NVRTC, which comes with torch for CUDA, is missing")


def _compiled(name: str, architecture: str) -> tuple[bytes, bytes]:
    """The machine code of one kernel, and its name in there."""
    library, program, size = _compiler(), ctypes.c_void_p(), ctypes.c_size_t()
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17", b"-default-device"]

    def check(code: int) -> None:
        if code:
            library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(max(1, size.value))
            library.nvrtcGetProgramLog(program, log)
            text = log.value.decode(errors="replace")
            raise RuntimeError(f"NVRTC cannot compile {name} for {architecture}: {text}")

    check(library.nvrtcCreateProgram(ctypes.byref(program), SOURCE.read_bytes(), b"kernels.cu", 0, None, None))
    try:
        check(library.nvrtcAddNameExpression(program, name.encode()))
        check(library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)))
        check(library.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        binary = ctypes.create_string_buffer(size.value)
        check(library.nvrtcGetCUBIN(program, binary))
        symbol = ctypes.c_char_p()
        check(library.nvrtcGetLoweredName(program, name.encode(), ctypes.byref(symbol)))
        return binary.raw, symbol.value or b""
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
