//! Tensors as Python gives them: memory that a Python object owns, lent to one call.
//!
//! - PYMEM-1 The object that owns the memory is held for the whole call: a buffer by its view, which forbids its
//!   owner to resize or free it; an address by the owner given beside it, by a counted reference.
//! - PYMEM-2 An address and its length are those of a tensor of `owner`. `python/offbeat` takes both from one
//!   tensor (`data_ptr()`, `nbytes`) in the statement that hands them over, and is the only caller.
//! - PYMEM-3 What is written to is writable: a read-only buffer is refused as `out`.
//! - PYMEM-4 The user leaves the tensors of a call alone while it runs, as with every function of numpy and torch
//!   that releases the GIL: nobody writes to what is read, nobody touches what is written.
#![expect(unsafe_code, reason = "PYMEM-1 to PYMEM-4 are what makes a Python object's memory a Memory")]

use crate::error::{Class, raise};
use offbeat_net::client::Memory;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;

/// One tensor's memory and what keeps it alive.
pub(crate) enum Held {
    Buffer(PyUntypedBuffer),
    Address { _owner: Py<PyAny>, address: usize, nbytes: usize },
}

/// For reading, or for writing as well.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

impl Held {
    /// Takes hold of an argument: a C-contiguous buffer, or (owner, address, number of bytes).
    pub(crate) fn take(given: &Bound<'_, PyAny>, access: Access) -> PyResult<Self> {
        if let Ok((owner, address, nbytes)) = given.extract() {
            return Ok(Self::Address { _owner: owner, address, nbytes });
        }
        let buffer = PyUntypedBuffer::get(given)?;
        if !buffer.is_c_contiguous() {
            return Err(raise(given.py(), Class::Config, "a tensor's memory must be C-contiguous"));
        }
        if access == Access::Write && buffer.readonly() {
            return Err(raise(given.py(), Class::Config, "an array to be written is read-only"));
        }
        Ok(Self::Buffer(buffer))
    }

    fn start_and_len(&self) -> (*mut u8, usize) {
        match self {
            Self::Buffer(buffer) => (buffer.buf_ptr().cast(), buffer.len_bytes()),
            Self::Address { _owner, address, nbytes } => {
                (std::ptr::with_exposed_provenance_mut(*address), *nbytes)
            }
        }
    }

    /// For a call that reads it and, if it was taken for writing, writes it.
    pub(crate) fn memory(&self) -> Memory<'_> {
        let (start, len) = self.start_and_len();
        // SAFETY: PYMEM-1 keeps the bytes there while `self` is borrowed, PYMEM-2 makes the length true; PYMEM-3 and
        // PYMEM-4 are what MEM-1 and MEM-2 ask for.
        unsafe { Memory::from_raw(start, len) }
    }

    /// For a call that only reads it.
    pub(crate) fn bytes(&self) -> &[u8] {
        let (start, len) = self.start_and_len();
        if len == 0 {
            return &[];
        }
        // SAFETY: PYMEM-1 and PYMEM-2 as above; PYMEM-4 keeps writers away.
        unsafe { std::slice::from_raw_parts(start, len) }
    }
}

/// Takes hold of a push's tensors; `None` stands for one that is left out.
pub(crate) fn take_values(given: &[Bound<'_, PyAny>]) -> PyResult<Vec<Option<Held>>> {
    given.iter().map(|g| if g.is_none() { Ok(None) } else { Held::take(g, Access::Read).map(Some) }).collect()
}

/// Takes hold of tensors to be written.
pub(crate) fn take_out(given: &[Bound<'_, PyAny>]) -> PyResult<Vec<Held>> {
    given.iter().map(|g| Held::take(g, Access::Write)).collect()
}

pub(crate) fn memories(held: &[Held]) -> Vec<Memory<'_>> {
    held.iter().map(Held::memory).collect()
}

pub(crate) fn optional_memories(held: &[Option<Held>]) -> Vec<Option<Memory<'_>>> {
    held.iter().map(|h| h.as_ref().map(Held::memory)).collect()
}
