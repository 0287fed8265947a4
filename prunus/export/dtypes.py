"""Element types as safetensors names them."""

import torch

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """The name of ``dtype``; ``name`` is the tensor's, for the complaint."""
    if dtype not in NAMES:
        raise ValueError(f"{name} has the type {dtype}, which safetensors cannot hold; cast it first")
    return NAMES[dtype]
