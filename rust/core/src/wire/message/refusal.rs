//! How either side says no.

use serde::{Deserialize, Serialize, Serializer};
use std::borrow::Cow;
use std::fmt;

/// Most bytes of [`Refused::message`] on the wire, without the note that it was cut: a person reads it, and it may quote
/// what a peer sent.
const MAX_REFUSAL_BYTES: usize = 16 << 10;

/// Why something was refused, for programs; the words are in [`Refused::message`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RefusalCode {
    /// No protocol in common.
    Protocol,
    /// No token, or another one.
    Authentication,
    /// Not this run.
    RunId,
    /// Another model.
    ModelMismatch,
    /// There is no model yet.
    NoModel,
    /// No optimizer is set, or another one than the worker's.
    Optimizer,
    /// Only the learning rate differs.
    LearningRate,
    /// The run's pushes carry something else.
    Contribution,
    /// Out of place: a frame that this state of the connection does not expect.
    State,
    /// A message that cannot be read, or a value that cannot be right.
    Malformed,
    /// A payload that was damaged on its way.
    Checksum,
    /// Too many connections or workers, or a model that does not fit.
    Full,
    /// A newer process has this worker's name, or the push contradicts one that was applied.
    Fenced,
    /// Nothing moved for too long.
    Timeout,
    /// The other connection of the session has ended.
    Lost,
    /// The run is over or ending.
    Finished,
    /// The server goes away, and will come again.
    Restarting,
    /// Nothing is known (any more) of a worker that wants to go on.
    Forgotten,
    /// A code of a newer build.
    #[serde(other)]
    Unknown,
}

/// Either side: no.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refused {
    pub code: RefusalCode,
    /// For the user: what happened, with which value, what to do. Sent up to 16 KiB of it.
    #[serde(serialize_with = "cut_to_fit")]
    pub message: String,
    /// Whether the sender closes the connection after this.
    pub fatal: bool,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

fn cut_to_fit<S: Serializer>(message: &str, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&cut(message, MAX_REFUSAL_BYTES))
}

/// Whether a peer's words can be shown as they are, in a log, a table or a terminal, and are no longer than that.
#[must_use]
pub fn is_printable(text: &str, most_bytes: usize) -> bool {
    text.len() <= most_bytes && !text.contains(char::is_control)
}

/// A text to show, or its first `most` bytes and how many there are: what a peer sent may be of any length.
#[must_use]
pub fn cut(text: &str, most: usize) -> Cow<'_, str> {
    if text.len() <= most {
        return text.into();
    }
    let end = (0..=most).rev().find(|&at| text.is_char_boundary(at)).unwrap_or_default();
    format!("{}… ({} bytes in all)", &text[..end], text.len()).into()
}
