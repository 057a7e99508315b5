//! The tensor table: what a model is made of, in order. Two sides that agree on it agree on everything that is
//! derived from it (the layout, the length of every frame), so a peer never says how long its data is.

use crate::dtype::Dtype;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;

/// Most tensors a table may name; bounds what a hostile table can make us allocate.
pub const MAX_TENSORS: usize = 100_000;
/// Most names in a table: each tensor's own, and its others.
pub const MAX_NAMES: usize = 300_000;
/// Longest tensor name, in bytes.
pub const MAX_NAME_BYTES: usize = 1024;
/// Most dimensions of one tensor.
pub const MAX_DIMS: usize = 16;
/// Other names of a tensor that are shown of it: a block that is used in 60 places has 59.
const ALIASES_SHOWN: usize = 3;
/// Most elements of one model, 8.6 G: 32 GiB of float32. Its fragments are laid out before its first byte comes, and a
/// worker names what it has of each in one message.
pub const MAX_ELEMENTS: u64 = 1 << 33;

/// Whether an optimizer moves a tensor or the model's own forward pass does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Moved by gradients. Whether it is frozen is each side's own affair and not part of the table.
    Parameter,
    /// Moved by the forward pass (`BatchNorm`'s statistics and the like).
    Buffer,
}

/// One tensor.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TensorSpec {
    pub name: String,
    /// Other names of the same memory (tied weights), in `state_dict` order.
    #[serde(default)]
    pub aliases: Vec<String>,
    pub shape: Vec<u64>,
    pub dtype: Dtype,
    pub role: Role,
}

impl TensorSpec {
    /// Number of elements; 1 for a scalar. Checked when the table was built.
    #[must_use]
    pub fn num_elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Its name, then its other names.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        std::iter::once(&self.name).chain(&self.aliases).map(String::as_str)
    }
}

impl fmt::Display for TensorSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {:?}", self.name, self.dtype.name(), self.shape)?;
        let shown = &self.aliases[..self.aliases.len().min(ALIASES_SHOWN)];
        match self.aliases.len() - shown.len() {
            0 if shown.is_empty() => Ok(()),
            0 => write!(f, " (also {})", shown.join(", ")),
            more => write!(f, " (also {} and {more} more names)", shown.join(", ")),
        }
    }
}

/// A table that cannot be used: which tensor, and why.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    #[error("a model without tensors cannot be trained; give one with at least one parameter")]
    Empty,
    #[error("the model has {0} tensors; at most {MAX_TENSORS} are supported")]
    TooManyTensors(usize),
    #[error("the model's tensors have {0} names; at most {MAX_NAMES} are supported")]
    TooManyNames(usize),
    #[error("the name of tensor number {index} is {bytes} bytes long; names are 1 to {MAX_NAME_BYTES} bytes")]
    Name { index: usize, bytes: usize },
    #[error("two tensors are called {0:?}; names must be unique")]
    Duplicate(String),
    #[error("tensor {name:?} has {dims} dimensions; at most {MAX_DIMS} are supported")]
    Dims { name: String, dims: usize },
    #[error("tensor {0:?} makes the model larger than {MAX_ELEMENTS} elements")]
    TooLarge(String),
    #[error(
        "parameter {name:?} has dtype {}; parameters are float32, float16 or bfloat16 (cast it, or keep it out of the model)",
        dtype.name()
    )]
    Untrainable { name: String, dtype: Dtype },
}

/// The tensors of a model, in order, checked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<TensorSpec>", into = "Vec<TensorSpec>")]
pub struct TensorTable(Vec<TensorSpec>);

impl TensorTable {
    /// Checks the specs and keeps them.
    ///
    /// # Errors
    /// [`TableError`], naming the first tensor that is wrong.
    pub fn new(tensors: Vec<TensorSpec>) -> Result<Self, TableError> {
        if tensors.is_empty() {
            return Err(TableError::Empty);
        }
        if tensors.len() > MAX_TENSORS {
            return Err(TableError::TooManyTensors(tensors.len()));
        }
        let num_names = tensors.iter().map(|t| 1 + t.aliases.len()).sum();
        if num_names > MAX_NAMES {
            return Err(TableError::TooManyNames(num_names));
        }
        let mut names = HashMap::with_capacity(num_names);
        let mut total = 0_u64;
        for (index, t) in tensors.iter().enumerate() {
            for name in t.names() {
                if name.is_empty() || name.len() > MAX_NAME_BYTES {
                    return Err(TableError::Name { index, bytes: name.len() });
                }
                if names.insert(name, index).is_some() {
                    return Err(TableError::Duplicate(name.to_owned()));
                }
            }
            if t.shape.len() > MAX_DIMS {
                return Err(TableError::Dims { name: t.name.clone(), dims: t.shape.len() });
            }
            let elements = t.shape.iter().try_fold(1_u64, |n, &d| n.checked_mul(d));
            total = elements
                .and_then(|n| total.checked_add(n))
                .filter(|&n| n <= MAX_ELEMENTS)
                .ok_or_else(|| TableError::TooLarge(t.name.clone()))?;
            if t.role == Role::Parameter && !t.dtype.trainable() {
                return Err(TableError::Untrainable { name: t.name.clone(), dtype: t.dtype });
            }
        }
        Ok(Self(tensors))
    }

    #[must_use]
    pub fn tensors(&self) -> &[TensorSpec] {
        &self.0
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Never true: a table has at least one tensor.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Where two tables part: the first position at which they differ, with what each side has there.
    #[must_use]
    pub fn first_difference(&self, other: &Self) -> Option<Difference> {
        (0..self.len().max(other.len())).find_map(|i| {
            let (ours, theirs) = (self.0.get(i), other.0.get(i));
            (ours != theirs).then(|| Difference { position: i, ours: ours.cloned(), theirs: theirs.cloned() })
        })
    }
}

impl TensorTable {
    /// As [`Self::first_difference`], whatever the order of both: the first tensor by name that one of them has not, or
    /// has otherwise.
    #[must_use]
    pub fn first_difference_by_name(&self, other: &Self) -> Option<Difference> {
        fn by_name(table: &TensorTable) -> BTreeMap<&str, (usize, &TensorSpec)> {
            table.0.iter().enumerate().map(|(i, spec)| (spec.name.as_str(), (i, spec))).collect()
        }
        let (ours, theirs) = (by_name(self), by_name(other));
        let names: BTreeSet<&str> = ours.keys().chain(theirs.keys()).copied().collect();
        names.into_iter().find_map(|name| {
            let (ours, theirs) = (ours.get(name), theirs.get(name));
            let spec = |side: Option<&(usize, &TensorSpec)>| side.map(|&(_, spec)| spec.clone());
            (spec(ours) != spec(theirs)).then(|| Difference {
                position: ours.or(theirs).map_or(0, |&(position, _)| position),
                ours: spec(ours),
                theirs: spec(theirs),
            })
        })
    }
}

impl TryFrom<Vec<TensorSpec>> for TensorTable {
    type Error = TableError;
    fn try_from(tensors: Vec<TensorSpec>) -> Result<Self, TableError> {
        Self::new(tensors)
    }
}

impl From<TensorTable> for Vec<TensorSpec> {
    fn from(table: TensorTable) -> Self {
        table.0
    }
}

/// The first position at which two tables differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    pub position: usize,
    pub ours: Option<TensorSpec>,
    pub theirs: Option<TensorSpec>,
}

impl fmt::Display for Difference {
    /// Written for the worker's user; "ours" is the server's table.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = |t: &Option<TensorSpec>| t.as_ref().map_or("nothing".to_owned(), ToString::to_string);
        write!(
            f,
            "tensor number {} differs: the server has {}, this worker has {}",
            self.position,
            side(&self.ours),
            side(&self.theirs)
        )?;
        match (&self.ours, &self.theirs) {
            (Some(ours), Some(theirs)) if ours.to_string() == theirs.to_string() => {
                write_what_is_not_shown(f, ours, theirs)
            }
            _ => Ok(()),
        }
    }
}

/// What two tensors differ in that read the same: their role, or a name that is not among those shown.
fn write_what_is_not_shown(
    f: &mut fmt::Formatter<'_>,
    ours: &TensorSpec,
    theirs: &TensorSpec,
) -> fmt::Result {
    let role = |t: &TensorSpec| match t.role {
        Role::Parameter => "parameter",
        Role::Buffer => "buffer",
    };
    if ours.role != theirs.role {
        return write!(f, "; there it is a {}, here a {}", role(ours), role(theirs));
    }
    let name = |t: &TensorSpec, i: usize| t.aliases.get(i).map_or("nothing".to_owned(), |n| format!("{n:?}"));
    let number = ours.aliases.iter().zip(&theirs.aliases).take_while(|(ours, theirs)| ours == theirs).count();
    write!(
        f,
        "; other name number {number} is {} there and {} here",
        name(ours, number),
        name(theirs, number)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(name: &str, shape: &[u64], dtype: Dtype, role: Role) -> TensorSpec {
        TensorSpec { name: name.into(), aliases: vec![], shape: shape.into(), dtype, role }
    }

    #[test]
    fn the_first_difference_names_both_sides() {
        let a = TensorTable::new(vec![tensor("w", &[2, 3], Dtype::F32, Role::Parameter)]).unwrap();
        let b = TensorTable::new(vec![tensor("w", &[3, 2], Dtype::BF16, Role::Parameter)]).unwrap();
        let text = a.first_difference(&b).unwrap().to_string();
        assert!(text.contains("float32 [2, 3]") && text.contains("bfloat16 [3, 2]"), "{text}");
        assert_eq!(a.first_difference(&a), None);
    }

    #[test]
    fn by_name_the_order_makes_no_difference() {
        let spec = |name: &str| tensor(name, &[2], Dtype::F32, Role::Parameter);
        let table = |names: &[&str]| TensorTable::new(names.iter().map(|name| spec(name)).collect()).unwrap();
        let ours = table(&["b", "a", "c"]);
        assert_eq!(ours.first_difference_by_name(&table(&["c", "b", "a"])), None);
        let missing = ours.first_difference_by_name(&table(&["c", "b"])).unwrap();
        assert_eq!((missing.position, missing.ours, missing.theirs), (1, Some(spec("a")), None));
        let more = ours.first_difference_by_name(&table(&["d", "c", "b", "a"])).unwrap();
        assert_eq!((more.position, more.ours, more.theirs), (0, None, Some(spec("d"))));
        let other = TensorTable::new(vec![spec("c"), spec("b"), tensor("a", &[3], Dtype::F32, Role::Buffer)]);
        let told = ours.first_difference_by_name(&other.unwrap()).unwrap().to_string();
        assert!(told.contains("a float32 [2]") && told.contains("a float32 [3]"), "{told}");
    }

    #[test]
    fn a_difference_is_told_in_few_words_however_many_names_there_are() {
        let block = |names: usize, shape, role| {
            let mut block = tensor("blocks.0.w", shape, Dtype::F32, role);
            block.aliases = (1..names).map(|i| format!("blocks.{i}.w")).collect();
            TensorTable::new(vec![block]).unwrap()
        };
        let ours = block(60, &[2], Role::Parameter);
        let text = |theirs: &TensorTable| ours.first_difference(theirs).unwrap().to_string();
        let other_shape = text(&block(60, &[3], Role::Parameter));
        assert!(other_shape.contains("also blocks.1.w, blocks.2.w, blocks.3.w and 56 more names"));
        assert!(other_shape.contains("float32 [2]") && other_shape.contains("float32 [3]"), "{other_shape}");
        assert!(other_shape.len() < 300, "{other_shape}");
        assert!(text(&block(60, &[2], Role::Buffer)).ends_with("there it is a parameter, here a buffer"));
        let mut renamed = block(60, &[2], Role::Parameter);
        renamed.0[0].aliases[40] = "tail".into();
        let renamed = text(&renamed);
        assert!(renamed.ends_with("name number 40 is \"blocks.41.w\" there and \"tail\" here"), "{renamed}");
    }

    #[test]
    fn float64_parameters_are_refused_by_name_and_float64_buffers_are_not() {
        let refused =
            TensorTable::new(vec![tensor("head.w", &[1], Dtype::F64, Role::Parameter)]).unwrap_err();
        assert!(refused.to_string().contains("\"head.w\" has dtype float64"));
        assert!(TensorTable::new(vec![tensor("stat", &[1], Dtype::F64, Role::Buffer)]).is_ok());
    }

    #[test]
    fn a_shape_whose_product_overflows_is_refused() {
        let refused = TensorTable::new(vec![tensor("w", &[u64::MAX, 2], Dtype::F32, Role::Parameter)]);
        assert_eq!(refused.unwrap_err(), TableError::TooLarge("w".into()));
    }

    #[test]
    fn more_names_than_a_message_may_hold_are_refused() {
        let mut tied = tensor("a", &[1], Dtype::F32, Role::Parameter);
        tied.aliases = (1..MAX_NAMES).map(|i| i.to_string()).collect();
        assert!(TensorTable::new(vec![tied.clone()]).is_ok());
        tied.aliases.push("b".into());
        assert_eq!(TensorTable::new(vec![tied]), Err(TableError::TooManyNames(MAX_NAMES + 1)));
    }

    #[test]
    fn an_alias_counts_as_a_name() {
        let mut tied = tensor("a", &[1], Dtype::F32, Role::Parameter);
        tied.aliases = vec!["b".into()];
        let refused = TensorTable::new(vec![tied, tensor("b", &[1], Dtype::F32, Role::Parameter)]);
        assert_eq!(refused.unwrap_err(), TableError::Duplicate("b".into()));
    }
}
