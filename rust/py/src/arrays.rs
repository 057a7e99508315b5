//! Named numpy arrays put into the order of the tensor table. With every push and pull they come again, and nearly
//! always they are just what is wanted: told here, that costs a tenth of what it costs in Python.

use crate::error::{Class, raise};
use numpy::{PyArrayDescr, PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};
use std::collections::HashMap;

/// What the table says of one tensor.
struct Entry {
    name: Py<PyString>,
    shape: Vec<usize>,
    dtype: Py<PyArrayDescr>,
}

impl Entry {
    /// Whether this is just the array that is wanted: numpy's own class, this dtype and shape, in C order.
    fn is_plain(&self, value: &Bound<'_, PyAny>) -> bool {
        let Ok(array) = value.cast_exact::<PyUntypedArray>() else { return false };
        array.is_c_contiguous()
            && array.shape() == self.shape
            && array.dtype().is_equiv_to(self.dtype.bind(value.py()))
    }
}

/// A tensor as Python describes it: its name and aliases, shape, dtype.
type Given<'py> = (Vec<Bound<'py, PyString>>, Vec<usize>, Bound<'py, PyArrayDescr>);

/// The tensor table as numpy knows it. `offbeat.Client` makes one and says what becomes of arrays that are not plain.
#[pyclass(frozen, module = "offbeat._offbeat")]
pub(crate) struct ArrayTable {
    entries: Vec<Entry>,
    positions: HashMap<String, usize>,
}

#[pymethods]
impl ArrayTable {
    /// Takes names, the first of which is the tensor's own, shape and dtype of each.
    #[new]
    fn new(py: Python<'_>, tensors: Vec<Given<'_>>) -> PyResult<Self> {
        let mut table = Self { entries: Vec::with_capacity(tensors.len()), positions: HashMap::new() };
        for (names, shape, dtype) in tensors {
            for name in &names {
                table.positions.insert(name.to_str()?.to_owned(), table.entries.len());
            }
            let Some(name) = names.into_iter().next() else {
                return Err(raise(py, Class::Config, "a tensor without a name"));
            };
            table.entries.push(Entry { name: name.unbind(), shape, dtype: dtype.unbind() });
        }
        Ok(table)
    }

    /// The arrays of a push in the table's order, `None` where there is none. Of one that is not plain, or that no
    /// tensor's name belongs to, `adapt(name, value)` makes a plain one, or raises.
    fn values<'py>(
        &self,
        py: Python<'py>,
        given: &Bound<'py, PyDict>,
        adapt: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyList>> {
        let mut values: Vec<Option<Bound<'py, PyAny>>> = vec![None; self.entries.len()];
        for (name, value) in given {
            let position =
                name.cast::<PyString>().ok().and_then(|n| self.positions.get(n.to_str().ok()?)).copied();
            let Some(position) = position else {
                adapt.call1((name, value))?;
                continue;
            };
            if value.is_none() {
                continue;
            }
            if values[position].is_some() {
                self.refuse_twice(given, &name, adapt, "the push")?;
                continue;
            }
            let is_plain = self.entries[position].is_plain(&value);
            values[position] = Some(if is_plain { value } else { adapt.call1((name, value))? });
        }
        PyList::new(py, values)
    }

    /// The arrays to be written, in the table's order. Of one that is not plain, not writable, missing (then it comes
    /// as `None`) or of no tensor's name, `adapt(name, value)` makes a plain one, or raises.
    fn memories<'py>(
        &self,
        py: Python<'py>,
        given: &Bound<'py, PyDict>,
        adapt: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyList>> {
        if given.len() > self.entries.len() {
            for (name, value) in given {
                let known = name.cast::<PyString>().ok().and_then(|n| self.positions.get(n.to_str().ok()?));
                match known {
                    None => drop(adapt.call1((name, value))?),
                    Some(&position) if name.eq(&self.entries[position].name)? => {}
                    Some(_) => self.refuse_twice(given, &name, adapt, "out")?,
                }
            }
        }
        let memory = |entry: &Entry| {
            let name = entry.name.bind(py);
            match given.get_item(name)? {
                Some(value) if entry.is_plain(&value) && is_writable(&value) => Ok(value),
                value => adapt.call1((name, value)),
            }
        };
        PyList::new(py, self.entries.iter().map(memory).collect::<PyResult<Vec<_>>>()?)
    }
}

impl ArrayTable {
    /// A tensor is to come once: under a second of its names only where that is the same memory.
    fn refuse_twice(
        &self,
        given: &Bound<'_, PyDict>,
        name: &Bound<'_, PyAny>,
        adapt: &Bound<'_, PyAny>,
        place: &str,
    ) -> PyResult<()> {
        let of =
            |n: &Bound<'_, PyAny>| self.positions.get(n.cast::<PyString>().ok()?.to_str().ok()?).copied();
        let begin = |array: &Bound<'_, PyAny>| -> PyResult<usize> {
            array.getattr("ctypes")?.getattr("data")?.extract()
        };
        let Some(mine) = given.get_item(name)? else { return Ok(()) };
        for (other, theirs) in given {
            if of(&other) != of(name) || theirs.is_none() || theirs.is(&mine) {
                continue;
            }
            // Both are held while they are compared: what had to be copied would have the address of another copy.
            let (array, other_array) = (adapt.call1((name, &mine))?, adapt.call1((&other, &theirs))?);
            if begin(&array)? != begin(&other_array)? {
                let (first, second) = (other.repr()?, name.repr()?);
                let message = format!(
                    "{place} has {first} and {second}, which are two names of one tensor, with an array each: \
                     give it once"
                );
                return Err(raise(name.py(), Class::ModelMismatch, message));
            }
        }
        Ok(())
    }
}

/// Whether an array may be written in place.
fn is_writable(value: &Bound<'_, PyAny>) -> bool {
    value.cast::<PyUntypedArray>().is_ok_and(crate::memory::is_writable)
}
