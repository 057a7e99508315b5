//! The heads of a push and of a pull. They travel 20 000 times a second, so they are a fixed binary form with a
//! version byte, read in place.
//!
//! ```text
//! push: 0 form u8 = 1   1 flags u8   2 reserved [u8; 2] = 0   4 epoch u32   8 samples u64
//!       then, where its flag is set: norm f64 | answered u32 | presence: u32 length, bytes | have: u32 count, u64 each
//! pull: 0 form u8 = 1   1 flags u8   2 reserved [u8; 6] = 0
//!       then, where its flag is set: have
//! ```

use super::cursor::{Cursor, MessageError};
use super::header::MAX_HEAD_BYTES;
use crate::layout::{MAX_FRAGMENTS, Presence};
use crate::table::MAX_TENSORS;

const FORM: u8 = 1;
const WANT_PARAMETERS: u8 = 1;
const HAS_NORM: u8 = 2;
const HAS_PRESENCE: u8 = 4;
const HAS_VERSIONS: u8 = 8;
const HAS_ANSWERED: u8 = 16;

/// Most samples that one push may say it is of: more is no number of samples, and the run's count must not be at its
/// mercy.
pub const MAX_SAMPLES: u64 = 1 << 32;

/// Bytes of a push's head without its lists, these with their lengths' four each.
const FIXED_BYTES: usize = 24 + 4 + 4 + 4;
// Of the largest model there is, a worker can say what it has.
const _: () = assert!(FIXED_BYTES + MAX_TENSORS.div_ceil(8) + 8 * MAX_FRAGMENTS <= MAX_HEAD_BYTES as usize);

/// What the worker wants back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    Receipt,
    /// The newest parameters, fragment by fragment, then the receipt.
    Parameters,
}

/// What a worker says about a push before it sends it; term, sequence and the version read are in the header.
#[derive(Clone, Debug, PartialEq)]
pub struct PushRequest<'a> {
    /// [`RunConfig::epoch`](super::message::RunConfig::epoch) of what the worker has been told: which optimizer it
    /// has made the push for.
    pub epoch: u32,
    pub samples: u64,
    /// L2 norm of the whole gradient, where the run asks for it and what is sent is not the gradient itself.
    pub norm: Option<f64>,
    pub want: Want,
    /// Of a push that is sent again: fragments below this one were answered before, and do not come again.
    pub answered: u32,
    /// [`Presence::as_bytes`]; `None`: every tensor.
    pub present: Option<&'a [u8]>,
    /// `None`: send every fragment. Else send what changed; the versions are those of the fragments that are
    /// not in this push, in order (those in it carry theirs in their own headers).
    pub have: Option<Versions<'a>>,
}

/// What a worker that pulls has already.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PullRequest<'a> {
    /// `None`: send every fragment. Else one version per fragment, read under the header's term.
    pub have: Option<Versions<'a>>,
}

/// A list of versions, still in its wire form or not yet in it.
#[derive(Clone, Copy, Debug)]
pub enum Versions<'a> {
    /// Little-endian, eight bytes each.
    Wire(&'a [u8]),
    Numbers(&'a [u64]),
}

impl Versions<'_> {
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Wire(bytes) => bytes.len() / 8,
            Self::Numbers(numbers) => numbers.len(),
        }
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    #[must_use]
    pub fn get(&self, i: usize) -> Option<u64> {
        match self {
            Self::Wire(bytes) => {
                let at = bytes.get(i.checked_mul(8)?..)?.first_chunk()?;
                Some(u64::from_le_bytes(*at))
            }
            Self::Numbers(numbers) => numbers.get(i).copied(),
        }
    }
}

impl PartialEq for Versions<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && (0..self.len()).all(|i| self.get(i) == other.get(i))
    }
}

impl Eq for Versions<'_> {}

impl<'a> PushRequest<'a> {
    /// Appends the wire form.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let mut flags = 0;
        flags |= if self.want == Want::Parameters { WANT_PARAMETERS } else { 0 };
        flags |= if self.norm.is_some() { HAS_NORM } else { 0 };
        flags |= if self.present.is_some() { HAS_PRESENCE } else { 0 };
        flags |= if self.have.is_some() { HAS_VERSIONS } else { 0 };
        flags |= if self.answered > 0 { HAS_ANSWERED } else { 0 };
        out.extend_from_slice(&[FORM, flags, 0, 0]);
        out.extend_from_slice(&self.epoch.to_le_bytes());
        out.extend_from_slice(&self.samples.to_le_bytes());
        if let Some(norm) = self.norm {
            out.extend_from_slice(&norm.to_le_bytes());
        }
        if self.answered > 0 {
            out.extend_from_slice(&self.answered.to_le_bytes());
        }
        if let Some(present) = self.present {
            put_len(out, present.len());
            out.extend_from_slice(present);
        }
        put_versions(out, self.have);
    }

    /// Reads the wire form.
    ///
    /// # Errors
    /// [`MessageError`] if a byte is missing, too much, or set where nothing may be.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, MessageError> {
        let mut cursor = Cursor(bytes);
        let flags = cursor.open(WANT_PARAMETERS | HAS_NORM | HAS_PRESENCE | HAS_VERSIONS | HAS_ANSWERED)?;
        let epoch = cursor.array().map(u32::from_le_bytes)?;
        let samples = cursor.u64()?;
        if samples > MAX_SAMPLES {
            return Err(MessageError::Form("it says that it is of more samples than a push can be"));
        }
        let norm = if flags & HAS_NORM != 0 { Some(f64::from_bits(cursor.u64()?)) } else { None };
        let answered = if flags & HAS_ANSWERED != 0 { cursor.array().map(u32::from_le_bytes)? } else { 0 };
        if flags & HAS_ANSWERED != 0 && answered == 0 {
            return Err(MessageError::Form(
                "it announces how much was answered, and the count is 0; leave the flag out instead",
            ));
        }
        let present = if flags & HAS_PRESENCE != 0 {
            let len = cursor.len()?;
            Some(cursor.take(len)?)
        } else {
            None
        };
        let have = cursor.versions(flags)?;
        cursor.end()?;
        let want = if flags & WANT_PARAMETERS != 0 { Want::Parameters } else { Want::Receipt };
        Ok(Self { epoch, samples, norm, want, answered, present, have })
    }

    /// The tensors this push brings.
    ///
    /// # Errors
    /// [`MessageError::Form`] if the bits are not those of a table with so many tensors.
    pub fn presence(&self, num_tensors: usize) -> Result<Presence, MessageError> {
        match self.present {
            None => Ok(Presence::all(num_tensors)),
            Some(bytes) => Presence::from_bytes(num_tensors, bytes)
                .ok_or(MessageError::Form("presence does not fit the model")),
        }
    }
}

impl<'a> PullRequest<'a> {
    /// Appends the wire form.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let flags = if self.have.is_some() { HAS_VERSIONS } else { 0 };
        out.extend_from_slice(&[FORM, flags, 0, 0, 0, 0, 0, 0]);
        put_versions(out, self.have);
    }

    /// Reads the wire form.
    ///
    /// # Errors
    /// [`MessageError`] if a byte is missing, too much, or set where nothing may be.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, MessageError> {
        let mut cursor = Cursor(bytes);
        let flags = cursor.open(HAS_VERSIONS)?;
        if cursor.array()? != [0; 4] {
            return Err(MessageError::Form("it sets bits that are reserved"));
        }
        let have = cursor.versions(flags)?;
        cursor.end()?;
        Ok(Self { have })
    }
}

fn put_len(out: &mut Vec<u8>, len: usize) {
    out.extend_from_slice(&u32::try_from(len).unwrap_or(u32::MAX).to_le_bytes());
}

fn put_versions(out: &mut Vec<u8>, versions: Option<Versions<'_>>) {
    let Some(versions) = versions else { return };
    put_len(out, versions.len());
    for i in 0..versions.len() {
        out.extend_from_slice(&versions.get(i).unwrap_or_default().to_le_bytes());
    }
}

/// What requests begin with.
impl<'a> Cursor<'a> {
    /// Form, flags and two reserved bytes; returns the flags.
    fn open(&mut self, known: u8) -> Result<u8, MessageError> {
        let [form, flags, reserved @ ..] = self.array::<4>()?;
        if form != FORM {
            return Err(MessageError::Form("its form is not known here"));
        }
        if flags & !known != 0 || reserved != [0; 2] {
            return Err(MessageError::Form("it sets bits that are reserved"));
        }
        Ok(flags)
    }

    fn versions(&mut self, flags: u8) -> Result<Option<Versions<'a>>, MessageError> {
        if flags & HAS_VERSIONS == 0 {
            return Ok(None);
        }
        let bytes = self.len()?.checked_mul(8).ok_or(MessageError::Form("it ends too early"))?;
        Ok(Some(Versions::Wire(self.take(bytes)?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;
    use crate::layout::Layout;
    use crate::table::{MAX_ELEMENTS, Role, TensorSpec, TensorTable};
    use crate::wire::Kind;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_push_survives_the_wire(epoch: u32, answered: u32, samples in 0..=MAX_SAMPLES, norm in prop::option::of(0.0_f64..1e300), all: bool,
                present in prop::option::of(prop::collection::vec(any::<u8>(), 0..40)),
                have in prop::option::of(prop::collection::vec(any::<u64>(), 0..40))) {
            let want = if all { Want::Parameters } else { Want::Receipt };
            let have = have.as_deref().map(Versions::Numbers);
            let push = PushRequest { epoch, samples, norm, want, answered, present: present.as_deref(), have };
            let mut bytes = vec![];
            push.encode(&mut bytes);
            prop_assert_eq!(PushRequest::decode(&bytes), Ok(push));
            for cut in 0..bytes.len() {
                prop_assert!(PushRequest::decode(&bytes[..cut]).is_err());
            }
        }

        #[test]
        fn a_pull_survives_the_wire(have in prop::option::of(prop::collection::vec(any::<u64>(), 0..40))) {
            let pull = PullRequest { have: have.as_deref().map(Versions::Numbers) };
            let mut bytes = vec![];
            pull.encode(&mut bytes);
            prop_assert_eq!(PullRequest::decode(&bytes), Ok(pull));
        }

        #[test]
        fn arbitrary_bytes_never_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            drop(PullRequest::decode(&bytes));
            drop(PushRequest::decode(&bytes));
            if bytes.len() >= 8 {
                bytes[0] = FORM;
                bytes[1] &= 31;
                bytes[2..8].fill(0);
                drop(PullRequest::decode(&bytes));
                if let Ok(push) = PushRequest::decode(&bytes) {
                    drop(push.presence(17));
                    if let Some(have) = push.have {
                        prop_assert!((0..have.len()).all(|i| have.get(i).is_some()));
                        prop_assert_eq!(have.get(have.len()), None);
                        prop_assert_eq!(have.get(usize::MAX), None);
                    }
                }
            }
        }
    }

    #[test]
    fn a_worker_of_the_largest_model_can_say_what_it_has() {
        let spec = |name: String, len, dtype, role| TensorSpec {
            name,
            aliases: vec![],
            shape: vec![len],
            dtype,
            role,
        };
        let small = [Dtype::F32, Dtype::F16, Dtype::BF16].map(|dtype| (dtype, Role::Parameter));
        let small = small.into_iter().chain(Dtype::ALL.map(|dtype| (dtype, Role::Buffer)));
        let mut specs: Vec<_> =
            small.map(|(dtype, role)| spec(format!("{role:?} {dtype:?}"), 1, dtype, role)).collect();
        let left = MAX_ELEMENTS - specs.len() as u64;
        specs.push(spec("large".into(), left, Dtype::F32, Role::Parameter));
        specs.extend((specs.len()..MAX_TENSORS).map(|i| spec(i.to_string(), 0, Dtype::F32, Role::Parameter)));
        let layout = Layout::of(&TensorTable::new(specs).unwrap());
        assert!((131_072..=MAX_FRAGMENTS).contains(&layout.fragments.len()), "{}", layout.fragments.len());
        let versions = vec![u64::MAX; layout.fragments.len()];
        let have = Some(Versions::Numbers(&versions));
        let mut bytes = vec![];
        PullRequest { have }.encode(&mut bytes);
        assert!(bytes.len() <= Kind::Pull.cap() as usize);
        let present = Presence::from_fn(MAX_TENSORS, |i| i != 0);
        let (norm, present) = (Some(1.0), Some(present.as_bytes()));
        let mut bytes = vec![];
        PushRequest { epoch: 1, samples: 1, norm, want: Want::Parameters, answered: 1, present, have }
            .encode(&mut bytes);
        assert!(bytes.len() <= Kind::Push.cap() as usize);
    }

    #[test]
    fn more_samples_than_a_push_can_be_of_are_refused() {
        for samples in [MAX_SAMPLES + 1, 1 << 63, u64::MAX] {
            let push = PushRequest {
                epoch: 1,
                samples,
                norm: None,
                want: Want::Receipt,
                answered: 0,
                present: None,
                have: None,
            };
            let mut bytes = vec![];
            push.encode(&mut bytes);
            assert!(PushRequest::decode(&bytes).unwrap_err().to_string().contains("more samples"));
        }
    }

    #[test]
    fn a_presence_of_another_model_is_refused() {
        let push = PushRequest {
            epoch: 1,
            samples: 1,
            norm: None,
            want: Want::Receipt,
            answered: 0,
            present: Some(&[0xff]),
            have: None,
        };
        assert!(push.presence(8).is_ok());
        assert!(push.presence(7).is_err() && push.presence(9).is_err());
    }
}
