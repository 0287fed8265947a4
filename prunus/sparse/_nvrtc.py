"""CUDA kernels compiled at their first use by the NVRTC that torch brings, and launched by the driver."""

import ctypes
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).with_name("kernels.cu")
MOST_SHARED = 8  # the driver's number of the attribute "largest dynamic shared memory"
_LOCAL = threading.local()


class Kernel:
    """A kernel of ``kernels.cu`` on one device: its launches cost the host little."""

    def __init__(self, name: str, num_args: int, device: int) -> None:
        self.driver, self.name, self.num_args, self.device = _driver(), name, num_args, device
        major, minor = torch.cuda.get_device_capability(device)
        binary, symbol = _compiled(name, f"sm_{major}{minor}")
        module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # there is a context from here on
            self._check(self.driver.cuModuleLoadData(ctypes.byref(module), binary))
            self._check(self.driver.cuModuleGetFunction(ctypes.byref(self.function), module, symbol))
            self.most_shared = most_shared(device)
            self._check(self.driver.cuFuncSetAttribute(self.function, MOST_SHARED, self.most_shared))
        self._blocks: dict[tuple[int, int], int] = {}

    def __call__(self, grid: int, threads: int, shared: int, args: Sequence[int]) -> None:
        """Launch it on the current stream; tensors are given as their addresses, None as 0."""
        cells, pointers = self._cells()
        for cell, arg in zip(cells, args, strict=True):
            cell.value = arg
        stream = torch.cuda.current_stream(self.device).cuda_stream
        code = self.driver.cuLaunchKernel(self.function, grid, 1, 1, threads, 1, 1, shared, stream, pointers, None)
        if code:
            self._check(code)

    def resident(self, threads: int, shared: int) -> int:
        """Blocks of such a launch that run at the same time on the whole device."""
        if (threads, shared) not in self._blocks:
            num, size = ctypes.c_int(), ctypes.c_size_t(shared)
            with torch.cuda.device(self.device):
                count = self.driver.cuOccupancyMaxActiveBlocksPerMultiprocessor
                self._check(count(ctypes.byref(num), self.function, threads, size))
            processors = torch.cuda.get_device_properties(self.device).multi_processor_count
            self._blocks[threads, shared] = max(1, num.value) * processors
        return self._blocks[threads, shared]

    def _cells(self) -> tuple[list[Any], Any]:
        """Memory of this thread's for the arguments, which the driver copies at the launch."""
        known = getattr(_LOCAL, f"of_{id(self)}", None)
        if known is None:
            cells = [ctypes.c_uint64() for _ in range(self.num_args)]  # of which a kernel reads as much as it needs
            pointers = (ctypes.c_void_p * len(cells))(*(ctypes.addressof(cell) for cell in cells))
            known = cells, pointers
            setattr(_LOCAL, f"of_{id(self)}", known)
        return known

    def _check(self, code: int) -> None:
        if code:
            text = ctypes.c_char_p()
            self.driver.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"the kernel {self.name} failed: {(text.value or b'unknown error').decode()}")


@cache
def kernel(name: str, num_args: int, device: int) -> Kernel:
    """The kernel by its name in C++, as ``gap_product<0, 2, 32>``."""
    return Kernel(name, num_args, device)


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
    except OSError:
        return False
    return True


@cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    library.cuLaunchKernel.argtypes = [pointer, *[number] * 7, pointer, pointer, pointer]
    return library


@cache
def _compiler() -> ctypes.CDLL:
    for name in (f"libnvrtc.so.{str(torch.version.cuda).partition('.')[0]}", "libnvrtc.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise OSError("NVRTC, which torch for CUDA brings, is not there")


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
            raise RuntimeError(f"NVRTC does not compile {name} for {architecture}: {text}")

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
