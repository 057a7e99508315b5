//! What happens to a push between its arrival and the optimizer, as pure functions over plain facts: is it let in
//! ([`mod@admit`]), what is it worth ([`weight`]), at which learning rate ([`schedule`]) and by which group's rule
//! ([`groups`]); and what these stages must see before they can tell ([`needs`]).
//!
//! **The law:** a push with τ = 0 passes all of them as it came, however many workers there are. Nothing here asks
//! how many. Nor does a push's number of samples scale anything: a gradient is a mean, and samples only drive
//! counters and schedules.

pub mod admit;
pub mod groups;
pub mod needs;
pub mod schedule;
pub mod verdict;
pub mod weight;

pub use admit::{PushFacts, admit};
pub use needs::{Need, need, transaction};
pub use verdict::{Reason, Verdict};
