//! Back to an earlier state, as a step forward: its values and what the optimizer remembered come back under a new term,
//! while tickets, counts and ledgers go on from where they are. So nothing that was answered is undone, and nothing that
//! was made on the values in between is applied.

use super::root::{OptimizerState, Root};
use super::ticket::same_rules;
use super::{Load, Store, raised};
use std::sync::Arc;

impl Store {
    /// Replaces every value, and the optimizer's state, by those of another store of the same table: one that was
    /// [resumed](Self::resume) from this one's earlier state. What it remembered for another optimizer than the run's now
    /// is left out. Otherwise as [`Self::load`].
    ///
    /// # Panics
    /// If the tables differ.
    pub fn roll_back(self: &Arc<Self>, to: &Arc<Self>) -> Load {
        assert!(self.table == to.table, "a store goes back to a state of its own");
        let (now, then) = (self.run(), to.run());
        // Made by the rules of now, it is this run's.
        let epoch = match (&now, &then) {
            (Some(now), Some(then)) if same_rules(&now.spec, &then.spec) => Some(now.epoch),
            _ => None,
        };
        let reader = to.reader();
        let _in_order = self.in_order();
        let at = raised(&mut self.registry());
        self.replace_all(at, &mut |fragment, term| {
            let root = reader.root(fragment);
            let state = root.state().zip(epoch).map(|(state, epoch)| self.copied(state, epoch));
            let mut data = self.pool.take(root.held().len());
            data.bytes_mut().copy_from_slice(root.held());
            Root::new(&self.layout.fragments[fragment], (term, 0), data, state, Box::default())
        })
    }

    fn copied(&self, state: &OptimizerState, epoch: u32) -> OptimizerState {
        let slots = state.slots.each_ref().map(|slot| {
            let from = slot.as_ref()?.bytes();
            let mut copy = self.pool.take(from.len());
            copy.bytes_mut().copy_from_slice(from);
            Some(copy)
        });
        OptimizerState { epoch, slots, steps: state.steps.clone() }
    }
}
