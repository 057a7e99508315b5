//! A model small enough to be pushed thousands of times a second: a fragment of each sort.

use offbeat_core::dtype::Dtype;
use offbeat_core::spec::{Group, OptimizerSpec, Rule};
use offbeat_core::table::{Role, TensorSpec, TensorTable};

fn tensor(name: &str, shape: &[u64], dtype: Dtype, role: Role) -> TensorSpec {
    TensorSpec { name: name.into(), aliases: vec![], shape: shape.into(), dtype, role }
}

/// Two types of parameters, a buffer of a third.
pub(crate) fn table() -> TensorTable {
    let specs = vec![
        tensor("w", &[5, 2], Dtype::F32, Role::Parameter),
        tensor("h", &[3], Dtype::BF16, Role::Parameter),
        tensor("seen", &[], Dtype::I64, Role::Buffer),
    ];
    TensorTable::new(specs).expect("it is one")
}

/// Bytes of each tensor, which are its fragments' too.
pub(crate) const BYTES: [usize; 3] = [40, 6, 8];

/// All zeros.
pub(crate) fn values() -> Vec<Vec<u8>> {
    BYTES.iter().map(|&bytes| vec![0; bytes]).collect()
}

pub(crate) fn sgd(momentum: f64) -> OptimizerSpec {
    let rule = Rule::Sgd { momentum, dampening: 0.0, weight_decay: 0.0, nesterov: false, maximize: false };
    let groups = vec![Group { pattern: "*".into(), lr: 1.0, rule }];
    OptimizerSpec { groups, momentum_correction: momentum > 0.0 }
}
