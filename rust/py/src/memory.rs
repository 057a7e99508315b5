//! Tensors as Python gives them: memory that a Python object owns, lent to one call.
//!
//! - PYMEM-1 The object that owns the memory is held for the whole call by a counted reference: an array, or the owner
//!   given beside an address. numpy does not move an array's memory while others refer to it.
//! - PYMEM-2 An address and its length are those of a tensor of `owner`. `python/offbeat` takes both from one
//!   tensor (`data_ptr()`, `nbytes`) in the statement that hands them over, and is the only caller.
//! - PYMEM-3 What is written to is writable: a read-only array is refused as `out`.
//! - PYMEM-4 The user leaves the tensors of a call alone while it runs, as with every function of numpy and torch
//!   that releases the GIL: nobody writes to what is read, nobody touches what is written.
#![expect(unsafe_code, reason = "PYMEM-1 to PYMEM-4 are what makes a Python object's memory a Memory")]

use crate::error::{Class, raise};
use numpy::npyffi::NPY_ARRAY_WRITEABLE;
use numpy::{PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use offbeat_net::client::Memory;
use pyo3::prelude::*;

/// One tensor's memory and what keeps it alive.
pub(crate) struct Held {
    _owner: Py<PyAny>,
    start: usize,
    nbytes: usize,
}

/// For reading, or for writing as well.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

impl Held {
    /// Takes hold of an argument: an array in C order, or (owner, address, number of bytes).
    pub(crate) fn take(given: &Bound<'_, PyAny>, access: Access) -> PyResult<Self> {
        let Ok(array) = given.cast::<PyUntypedArray>() else {
            let (owner, start, nbytes) = given.extract()?;
            return Ok(Self { _owner: owner, start, nbytes });
        };
        if !array.is_c_contiguous() {
            return Err(raise(given.py(), Class::Config, "an array must be C-contiguous"));
        }
        if access == Access::Write && !is_writable(array) {
            return Err(raise(given.py(), Class::Config, "an array to be written is read-only"));
        }
        // SAFETY: it is an array, and attached to the interpreter nobody changes it now.
        let start = unsafe { (*array.as_array_ptr()).fields.data };
        let nbytes = array.len() * array.dtype().itemsize();
        Ok(Self { _owner: given.clone().unbind(), start: start.expose_provenance(), nbytes })
    }

    fn start_and_len(&self) -> (*mut u8, usize) {
        (std::ptr::with_exposed_provenance_mut(self.start), self.nbytes)
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

/// Whether an array may be written in place.
pub(crate) fn is_writable(array: &Bound<'_, PyUntypedArray>) -> bool {
    // SAFETY: it is an array, and attached to the interpreter nobody changes it now.
    let flags = unsafe { (*array.as_array_ptr()).fields.flags };
    flags & NPY_ARRAY_WRITEABLE != 0
}

/// Takes hold of a push's tensors; `None` stands for one that is left out.
pub(crate) fn take_values(given: &[Bound<'_, PyAny>]) -> PyResult<Vec<Option<Held>>> {
    given.iter().map(|g| if g.is_none() { Ok(None) } else { Held::take(g, Access::Read).map(Some) }).collect()
}

/// Takes hold of a model's tensors, to be read.
pub(crate) fn take_tensors(given: &[Bound<'_, PyAny>]) -> PyResult<Vec<Held>> {
    given.iter().map(|g| Held::take(g, Access::Read)).collect()
}

pub(crate) fn tensors(held: &[Held]) -> Vec<&[u8]> {
    held.iter().map(Held::bytes).collect()
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
