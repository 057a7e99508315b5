//! Reading a payload step by step: it may end anywhere, and say anything.

/// A payload that does not say what its kind should.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    #[error("a message cannot be read: {0}")]
    Decode(String),
    #[error("a message cannot be read: {0}")]
    Form(&'static str),
}

/// What is left to read; every step is checked.
pub(super) struct Cursor<'a>(pub(super) &'a [u8]);

impl<'a> Cursor<'a> {
    pub(super) fn take(&mut self, n: usize) -> Result<&'a [u8], MessageError> {
        let (head, tail) = self.0.split_at_checked(n).ok_or(MessageError::Form("it ends too early"))?;
        self.0 = tail;
        Ok(head)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], MessageError> {
        let (head, tail) = self.0.split_first_chunk().ok_or(MessageError::Form("it ends too early"))?;
        self.0 = tail;
        Ok(*head)
    }

    pub(super) fn u64(&mut self) -> Result<u64, MessageError> {
        self.array().map(u64::from_le_bytes)
    }

    pub(super) fn len(&mut self) -> Result<usize, MessageError> {
        self.array().map(|b| u32::from_le_bytes(b) as usize)
    }

    pub(super) fn end(&self) -> Result<(), MessageError> {
        if self.0.is_empty() { Ok(()) } else { Err(MessageError::Form("bytes follow its end")) }
    }
}
