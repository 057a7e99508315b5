//! A safetensors file: a header that says which tensors lie where, and their values. For the same tensors it is always
//! the same, byte by byte, so a reader makes it anew from the manifest and compares, and parses nothing.

use super::error::CheckpointError;
use crate::dtype::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use std::collections::HashMap;
use std::io::{Read, Seek, SeekFrom, Write};

/// The format's own limit on a header.
const MAX_HEADER_BYTES: usize = 100_000_000;
/// The header's length, before it.
const LENGTH_BYTES: usize = 8;
/// A header is filled up with spaces, so that the tensors behind it are aligned.
const ALIGNMENT: usize = 64;
/// What the format keeps for itself.
const RESERVED: &str = "__metadata__";

/// One tensor of a file, in the order of their values.
#[derive(Clone, Debug)]
pub(super) struct Planned {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
}

impl Planned {
    /// The table has seen to it that this does not overflow.
    fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.size()
    }
}

/// What stands before the values of these tensors.
pub(super) fn header(file: &'static str, tensors: &[Planned]) -> Result<Vec<u8>, CheckpointError> {
    let unwritable = |what: String| CheckpointError::Unwritable { what };
    if tensors.iter().any(|tensor| tensor.name == RESERVED) {
        return Err(unwritable(format!(
            "a tensor called {RESERVED:?}: safetensors keeps that name for itself"
        )));
    }
    let mut end = 0;
    let info = |tensor: &Planned| {
        let start = end;
        end += tensor.bytes();
        let (dtype, shape) = (dtype(tensor.dtype), tensor.shape.clone());
        (tensor.name.clone(), TensorInfo { dtype, shape, data_offsets: (start, end) })
    };
    let metadata = Metadata::new(None, tensors.iter().map(info).collect());
    let metadata = metadata.map_err(|e| unwritable(format!("{file}: {e}")))?;
    let json = serde_json::to_vec(&metadata).map_err(|e| unwritable(format!("{file}: {e}")))?;
    let all = (LENGTH_BYTES + json.len()).next_multiple_of(ALIGNMENT);
    if all > MAX_HEADER_BYTES {
        let what =
            format!("a header of {all} bytes in {file}, at most {MAX_HEADER_BYTES}: use shorter names");
        return Err(unwritable(what));
    }
    let mut header = ((all - LENGTH_BYTES) as u64).to_le_bytes().to_vec();
    header.extend_from_slice(&json);
    header.resize(all, b' ');
    Ok(header)
}

/// Writes [`header`].
pub(super) fn write_header(
    file: &'static str,
    tensors: &[Planned],
    to: &mut impl Write,
) -> Result<(), CheckpointError> {
    to.write_all(&header(file, tensors)?).map_err(CheckpointError::writing(file))
}

/// A file that holds the tensors it should.
pub(super) struct TensorFile<F> {
    name: &'static str,
    file: F,
    /// Where each begins.
    starts: HashMap<String, u64>,
}

impl<F: Read + Seek> TensorFile<F> {
    /// Looks whether a file holds just these tensors.
    pub(super) fn open(
        name: &'static str,
        mut file: F,
        tensors: Vec<Planned>,
    ) -> Result<Self, CheckpointError> {
        let expected = header(name, &tensors)?;
        let mut found = vec![0; expected.len()];
        file.read_exact(&mut found).map_err(CheckpointError::reading(name))?;
        if found != expected {
            let what = "its header does not say the tensors that the manifest says";
            return Err(CheckpointError::malformed(name, what));
        }
        let mut end = expected.len() as u64;
        let mut starts = HashMap::with_capacity(tensors.len());
        for tensor in tensors {
            let bytes = tensor.bytes() as u64;
            starts.insert(tensor.name, end);
            end += bytes;
        }
        let bytes = file.seek(SeekFrom::End(0)).map_err(CheckpointError::reading(name))?;
        if bytes != end {
            let what = format!("it has {bytes} bytes where its tensors make {end}");
            return Err(CheckpointError::malformed(name, what));
        }
        Ok(Self { name, file, starts })
    }

    /// Reads part of a tensor, from a byte of it on.
    ///
    /// # Panics
    /// If the tensor is not among those that it was opened with.
    pub(super) fn read(&mut self, tensor: &str, from: u64, to: &mut [u8]) -> Result<(), CheckpointError> {
        let place = SeekFrom::Start(self.starts[tensor] + from);
        let read = self.file.seek(place).and_then(|_| self.file.read_exact(to));
        read.map_err(CheckpointError::reading(self.name))
    }
}

fn dtype(dtype: Dtype) -> safetensors::Dtype {
    match dtype {
        Dtype::F32 => safetensors::Dtype::F32,
        Dtype::F16 => safetensors::Dtype::F16,
        Dtype::BF16 => safetensors::Dtype::BF16,
        Dtype::F64 => safetensors::Dtype::F64,
        Dtype::I8 => safetensors::Dtype::I8,
        Dtype::I16 => safetensors::Dtype::I16,
        Dtype::I32 => safetensors::Dtype::I32,
        Dtype::I64 => safetensors::Dtype::I64,
        Dtype::U8 => safetensors::Dtype::U8,
        Dtype::Bool => safetensors::Dtype::BOOL,
    }
}
