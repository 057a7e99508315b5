//! The secret that a server and its workers share.

use std::fmt;
use std::ops::Deref;

/// A token. Its text is for a handshake's proof; what is shown of it ends in logs and reports, and does not tell it.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Deref for Token {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl<T: Into<String>> From<T> for Token {
    fn from(text: T) -> Self {
        Self(text.into())
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(***)")
    }
}
