"""The dtypes and roles of the server's tensor table, in plain Python: numpy and torch know them by name."""

from typing import Literal

__all__ = ["CODES", "NAMES", "TRAINABLE", "Role"]

Role = Literal["parameter", "buffer"]

#: The table's dtypes, by the names that numpy and torch share.
NAMES = {
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "f64": "float64",
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "u8": "uint8",
    "bool": "bool",
}
CODES = {name: code for code, name in NAMES.items()}

#: Those that a parameter may have.
TRAINABLE = ("f32", "f16", "bf16")
