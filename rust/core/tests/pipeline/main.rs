//! From arrival to optimizer: the law, the closed forms, the door, and the gate in front of every spec.

mod admit;
mod groups;
mod schedule;
mod validate;
mod weight;
