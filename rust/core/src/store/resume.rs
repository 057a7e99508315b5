//! A store that goes on from another's state: at its start from a checkpoint, in a term of its own.

use super::block::{Block, Pool};
use super::book::{Book, BookError};
use super::registry::{Attendance, Registry};
use super::root::{OptimizerState, Root};
use super::ticket::Run;
use super::{Store, StoreConfig};
use crate::layout::{Fragment, Layout};
use crate::table::TensorTable;
use std::sync::Arc;

/// What a store was at a cut: what its registry had written down, and the roots that belong to that.
#[derive(Clone, Debug)]
pub struct StoreState {
    pub book: Book,
    /// [`Store::attendance`] when the book was written.
    pub attendance: Attendance,
    /// What the book's run is resolved to.
    pub run: Option<Arc<Run>>,
    /// By fragment.
    pub roots: Vec<Arc<Root>>,
}

/// What tells one life of a store from those before it.
#[derive(Clone, Copy, Debug)]
pub struct Life {
    /// Above every term before.
    pub term: u64,
    /// No life before has issued an incarnation above this one.
    pub last_incarnation: u32,
}

/// One fragment of a state, in memory of the new store.
#[derive(Debug)]
pub struct ResumedFragment {
    /// Updates applied to it.
    pub version: u64,
    /// As [`Root::held`]: [`Fragment::held_bytes`] long.
    pub data: Block,
    pub state: Option<OptimizerState>,
}

/// Why a store cannot go on from a state.
#[derive(Debug, thiserror::Error)]
pub enum ResumeError<E> {
    #[error("the book cannot be read: {0}")]
    Book(#[from] BookError),
    /// What gives the fragments has failed.
    #[error(transparent)]
    Fragment(E),
}

impl Store {
    /// A store that goes on from a state. `run` is the book's, [resolved](Book::resolve); `give` makes each fragment, in
    /// order, in memory of the pool.
    ///
    /// # Errors
    /// [`ResumeError`] if no store has written the book, and what `give` fails with.
    pub fn resume<E>(
        table: Arc<TensorTable>,
        config: StoreConfig,
        life: Life,
        book: Book,
        run: Option<Arc<Run>>,
        mut give: impl FnMut(&Fragment, &Arc<Pool>) -> Result<ResumedFragment, E>,
    ) -> Result<Arc<Self>, ResumeError<E>> {
        let layout = Arc::new(Layout::of(&table));
        let pool = Arc::new(Pool::default());
        book.check(layout.fragments.len())?;
        if life.term <= book.term {
            let what =
                format!("is {}, and the life that goes on from there would be {}", book.term, life.term);
            return Err(BookError { field: "term".to_owned(), what }.into());
        }
        let mut roots = Vec::with_capacity(layout.fragments.len());
        let ledgers = book.ledgers(layout.fragments.len());
        for (fragment, ledger) in layout.fragments.iter().zip(ledgers) {
            let ResumedFragment { version, data, state } =
                give(fragment, &pool).map_err(ResumeError::Fragment)?;
            roots.push(Arc::new(Root::new(fragment, (life.term, version), data, state, ledger.into())));
        }
        let version = book.version;
        let registry = Registry::resumed(book, run, life, &config, &layout)?;
        Ok(Self::assemble(table, layout, config, pool, registry, roots, version))
    }
}
