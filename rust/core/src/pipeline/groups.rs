//! Which parameter group a tensor belongs to: the first whose pattern matches its name, or another name of it.
//!
//! A pattern is for the whole name: `*` is any run of characters, dots included, `?` is one. All other characters, `[`
//! too, stand for themselves.

use crate::spec::Group;
use crate::table::{TensorSpec, TensorTable};

/// The group index of each tensor, in order. What no pattern matches belongs to the last group, whose pattern a
/// [validated](crate::spec::OptimizerSpec::validate) spec has as `*`.
#[must_use]
pub fn assign(groups: &[Group], table: &TensorTable) -> Vec<u16> {
    let last = groups.len().saturating_sub(1);
    let is_in = |group: &Group, tensor: &TensorSpec| tensor.names().any(|name| matches(&group.pattern, name));
    let index = |tensor| groups.iter().position(|group| is_in(group, tensor)).unwrap_or(last);
    table.tensors().iter().map(|tensor| u16::try_from(index(tensor)).unwrap_or(u16::MAX)).collect()
}

/// Whether the whole name fits the pattern, in at most |pattern| × |name| steps whatever the pattern.
///
/// Only the latest `*` is ever widened: an earlier one cannot help, since what follows it was matched as far left
/// as it goes.
#[must_use]
pub fn matches(pattern: &str, name: &str) -> bool {
    let (mut pattern, mut name) = (pattern.chars(), name.chars());
    // What follows the latest star, and the part of the name that the star has not taken.
    let mut star = None;
    loop {
        let (mut pattern_rest, mut name_rest) = (pattern.clone(), name.clone());
        match (pattern_rest.next(), name_rest.next()) {
            (Some('*'), _) => {
                star = Some((pattern_rest.clone(), name.clone()));
                pattern = pattern_rest;
            }
            (None, None) => return true,
            (Some(expected), Some(found)) if expected == '?' || expected == found => {
                (pattern, name) = (pattern_rest, name_rest);
            }
            _ => {
                let Some((after, untaken)) = &mut star else {
                    return false;
                };
                if untaken.next().is_none() {
                    return false;
                }
                (pattern, name) = (after.clone(), untaken.clone());
            }
        }
    }
}
