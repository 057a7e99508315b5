//! Element types a tensor may have on the wire and in the store.

use serde::{Deserialize, Serialize};

/// Element type. Parameters are `F32`, `F16` or `BF16` (held in f32 by the store); buffers may be any of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    F32,
    F16,
    BF16,
    F64,
    I8,
    I16,
    I32,
    I64,
    U8,
    Bool,
}

const _: () = assert!(Dtype::ALL.len() == Dtype::Bool as usize + 1);

impl Dtype {
    /// Every type.
    pub const ALL: [Self; 10] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::F64,
        Self::I8,
        Self::I16,
        Self::I32,
        Self::I64,
        Self::U8,
        Self::Bool,
    ];

    /// Bytes of one element on the wire.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::I8 | Self::U8 | Self::Bool => 1,
            Self::F16 | Self::BF16 | Self::I16 => 2,
            Self::F32 | Self::I32 => 4,
            Self::F64 | Self::I64 => 8,
        }
    }

    /// Name as numpy and torch users know it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::BF16 => "bfloat16",
            Self::F64 => "float64",
            Self::I8 => "int8",
            Self::I16 => "int16",
            Self::I32 => "int32",
            Self::I64 => "int64",
            Self::U8 => "uint8",
            Self::Bool => "bool",
        }
    }

    /// Whether a trainable parameter may have this type.
    #[must_use]
    pub const fn trainable(self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::BF16)
    }
}
