//! What only the process that made it may drop: in a forked child its threads are gone and its sockets are the
//! parent's, so there it is left as it is.

use pyo3::prelude::*;
use std::mem::ManuallyDrop;

pub(crate) struct Owned<T: Send> {
    /// `Some` until dropped.
    value: Option<T>,
    process: u32,
}

impl<T: Send> Owned<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { value: Some(value), process: std::process::id() }
    }

    pub(crate) fn get(&self) -> &T {
        self.value.as_ref().expect("taken by drop alone")
    }
}

impl<T: Send> Drop for Owned<T> {
    /// Without the GIL, since it may wait for threads to end.
    fn drop(&mut self) {
        let Some(value) = self.value.take() else { return };
        if self.process == std::process::id() {
            let mut value = Some(value);
            Python::try_attach(|py| py.detach(|| drop(value.take())));
            drop(value);
        } else {
            let _left = ManuallyDrop::new(value);
        }
    }
}
