//! What a worker may ask on its data connection besides pushes and pulls.

use super::membership::{ModelInfo, RunConfig};
use crate::spec::{Contribution, OptimizerSpec};
use crate::table::TensorTable;
use serde::{Deserialize, Serialize};

/// The term of a server's first life: a model that a worker brings begins with its server's, whose values are version 0.
pub const FIRST_TERM: u64 = 1;

/// Most bytes of the words by which a worker takes part in rounds: the server keeps them for each that waits.
pub const MOST_TERMS_BYTES: usize = 1 << 10;

/// A request on the data connection; answered by [`Reply`] or [`Refused`](super::Refused).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Call {
    /// I bring a model. If the answer is `taken`, one [`Kind::Value`](crate::wire::Kind::Value) frame per fragment
    /// follows, in order, then [`Call::InitCommit`]. Waits while another worker is bringing one.
    InitBegin {
        table: TensorTable,
        blueprint: Option<String>,
        /// Which model gives way to mine, if there is one; `None`: any stays.
        #[serde(default)]
        replaces: Option<Replaces>,
    },
    /// All values are sent; they become the model.
    InitCommit,
    /// Answer when there is a model.
    WaitModel,
    /// What this worker's pushes carry, and the optimizer it was given, if any.
    Configure { contribution: Contribution, optimizer: Option<OptimizerSpec> },
    /// The server's status as JSON.
    Status,
    /// I have something to put together with what the others have. Answered when the round closes; asked again before
    /// [`Call::Gather`], the answer is the same.
    Enter {
        /// What my share is measured by: finite, and not negative.
        samples: f64,
        /// Whether I go on after this; else I only wait for the others' end.
        at_work: bool,
        /// How long, since the first has entered, I would have the round wait for those who have not; the longest that
        /// is given counts. `None`: I do not say.
        grace_ms: Option<u64>,
        /// How many I would have in the round, this worker among them; waited for no longer than the grace lets, and not by
        /// who has ended.
        #[serde(default)]
        at_least: Option<u32>,
        /// How long I would have the round wait, where all in it have ended, for each worker that is there and has entered
        /// none yet; the longest that is given counts. `None`: not at all.
        #[serde(default)]
        linger_ms: Option<u64>,
        /// By what I take part, in words, of [`MOST_TERMS_BYTES`] at most: refused where others take part by something
        /// else. `None`: I do not say.
        #[serde(default)]
        terms: Option<String>,
        /// By what I would take part from the next round on, if all would; `None`: by the same.
        #[serde(default)]
        wish: Option<String>,
        /// What of my push is to be measured by other samples. `None`: nothing.
        #[serde(default)]
        new: Option<New>,
    },
    /// My push in this round has ended. Answered when everybody's in it has, or is not to come any more.
    Gather { round: u64 },
    /// This worker ends.
    Goodbye { parting: Parting },
}

/// Which model gives way to the values that a worker brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Replaces {
    /// The one that the server's owner began with, as long as it is that.
    Untrained,
    /// The one of this term and version: what was in it is in mine. Or the one that a server goes on from which was started
    /// again, if its checkpoint was the newest, of no newer version, and its values were in place in that term: as long as
    /// nobody has pushed since.
    At { term: u64, version: u64 },
}

/// A part of a push that is in a round for the first time: other samples have led to it than to the rest. It has shares of
/// its own where all who enter the round say the same, and somebody has samples.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub struct New {
    /// What its share is measured by: finite, and not negative.
    pub samples: f64,
    /// Which part: a number that is the same where that is.
    pub of: u64,
}

/// How a worker ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Parting {
    /// Its work is done.
    Finished,
    /// It leaves before that.
    Left { cause: Option<String> },
    /// It joined and could not begin, its model being another one, say: nobody needs to wait for it or miss it.
    Withdrawn { cause: Option<String> },
}

/// The answer to a [`Call`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// `false`: there is a model already, its table is the worker's, and it stays.
    Init {
        taken: bool,
    },
    /// There is a model.
    Model {
        model: ModelInfo,
        run: RunConfig,
        term: u64,
        version: u64,
    },
    Configured {
        run: RunConfig,
    },
    Status {
        json: String,
    },
    Entered {
        /// Counted from 1, in each life of the server.
        round: u64,
        /// Of all samples in the round; 0 where nobody has any.
        share: f64,
        members: u32,
        /// How many of these go on.
        at_work: u32,
        /// Whether all wish for the same, by which they take part from now on.
        #[serde(default = "yes")]
        agreed: bool,
        /// Of the samples of what is [new](New). `None`: there is one share for all.
        #[serde(default)]
        new_share: Option<f64>,
    },
    Gathered {
        /// Shares of workers that were lost or went before they had gathered.
        missing: u64,
        /// The model's, now; 0 as long as there is none.
        version: u64,
    },
    Goodbye,
}

const fn yes() -> bool {
    true
}
