//! The fuzzer's bytes as choices: what has run out is zeros.

/// What is left of them.
pub(crate) struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn byte(&mut self) -> u8 {
        let [byte] = self.array();
        byte
    }

    pub(crate) fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let (head, tail) = self.0.split_at(self.0.len().min(N));
        array[..head.len()].copy_from_slice(head);
        self.0 = tail;
        array
    }

    /// One of so many, at least one.
    pub(crate) fn index(&mut self, len: usize) -> usize {
        usize::from(u16::from_le_bytes(self.array())) % len
    }

    pub(crate) fn rest(self) -> &'a [u8] {
        self.0
    }
}
