//! The update rules: torch's statements as the oracle, the same bits on every instruction set, and what a weight does.

mod isa;
mod rules;
mod scan;
mod support;
mod torch;
mod velocity;
mod weight;
