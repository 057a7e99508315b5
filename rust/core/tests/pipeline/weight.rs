//! The law, and each policy's closed form.

use offbeat_core::pipeline::weight::weight;
use offbeat_core::spec::Weight;
use proptest::prelude::*;

fn policy() -> impl Strategy<Value = Weight> {
    prop_oneof![
        Just(Weight::Constant),
        (1e-6..=1.0).prop_map(|factor| Weight::AdaptiveLr { factor }),
        Just(Weight::Inverse),
        (0.0..20.0).prop_map(|a| Weight::Polynomial { a }),
        (0.0..1e6, 0_u64..20).prop_map(|(a, b)| Weight::Hinge { a, b }),
    ]
}

proptest! {
    #[test]
    fn a_fresh_push_is_worth_exactly_one(policies in prop::collection::vec(policy(), 0..6)) {
        prop_assert_eq!(weight(&policies, 0).to_bits(), 1.0_f64.to_bits());
    }

    #[test]
    fn waiting_never_makes_a_push_worth_more(
        policies in prop::collection::vec(policy(), 0..4), tau in 0_u64..1000, longer in 0_u64..1000,
    ) {
        let (early, late) = (weight(&policies, tau), weight(&policies, tau + longer));
        prop_assert!((0.0..=1.0).contains(&late));
        // pow is not promised to be monotone in the last bit.
        prop_assert!(late <= early * (1.0 + 1e-15));
    }

    #[test]
    fn policies_multiply(a in policy(), b in policy(), tau in 0_u64..1000) {
        prop_assert_eq!(weight(&[a, b], tau), weight(&[a], tau) * weight(&[b], tau));
    }

    #[test]
    fn closed_forms(tau in 0_u32..60, factor in 0.5..1.0, a in 0.0..5.0, b in 0_u64..60) {
        let late = f64::from(tau);
        for (policy, expected) in [
            (Weight::Constant, 1.0),
            (Weight::AdaptiveLr { factor }, (0..tau).fold(1.0, |product, _| product * factor)),
            (Weight::Inverse, 1.0 / (1.0 + late)),
            (Weight::Polynomial { a }, (-a * (1.0 + late).ln()).exp()),
            (Weight::Hinge { a, b }, 1.0 / (a * (late - b as f64).max(0.0) + 1.0)),
        ] {
            let weight = weight(&[policy], tau.into());
            prop_assert!((weight - expected).abs() <= 1e-12 * expected, "{policy:?}: {weight}, not {expected}");
        }
    }
}

#[test]
fn numbers_that_users_are_told() {
    assert_eq!(weight(&[], 7), 1.0);
    assert!((weight(&[Weight::AdaptiveLr { factor: 0.9 }], 2) - 0.81).abs() < 1e-15);
    assert_eq!(weight(&[Weight::Inverse], 3), 0.25);
    assert_eq!(weight(&[Weight::Polynomial { a: 0.5 }], 3), 0.5);
    let hinge = Weight::Hinge { a: 10.0, b: 4 };
    assert_eq!([4, 5, 6].map(|tau| weight(&[hinge], tau)), [1.0, 1.0 / 11.0, 1.0 / 21.0]);
}

#[test]
fn a_push_from_long_ago_is_worth_a_number() {
    for policy in [
        Weight::AdaptiveLr { factor: 0.5 },
        Weight::Inverse,
        Weight::Polynomial { a: 300.0 },
        Weight::Constant,
    ] {
        assert!((0.0..=1.0).contains(&weight(&[policy], u64::MAX)));
    }
}
