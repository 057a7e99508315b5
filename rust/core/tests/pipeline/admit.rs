//! The door: each reason, their order, their names, and what a policy needs to see.

use offbeat_core::pipeline::{Need, PushFacts, Reason, Verdict, admit, need, transaction};
use offbeat_core::spec::{StalenessSpec, Transaction};
use proptest::prelude::*;

fn reason(spec: &StalenessSpec, facts: &PushFacts) -> Option<Reason> {
    match admit(spec, facts) {
        Verdict::Admit => None,
        Verdict::Reject { reason, detail } => {
            assert!(!detail.is_empty());
            Some(reason)
        }
    }
}

fn limits(max_staleness: Option<u64>, max_norm: Option<f64>) -> StalenessSpec {
    StalenessSpec { max_staleness, max_norm, ..StalenessSpec::default() }
}

proptest! {
    #[test]
    fn a_fresh_finite_push_is_admitted(max_staleness in any::<Option<u64>>()) {
        prop_assert_eq!(admit(&limits(max_staleness, None), &PushFacts::default()), Verdict::Admit);
    }

    #[test]
    fn a_push_staler_than_the_bound_is_rejected_and_one_at_the_bound_is_not(
        bound in 0_u64..100, staleness in 0_u64..200,
    ) {
        let facts = PushFacts { staleness, ..PushFacts::default() };
        let expected = (staleness > bound).then_some(Reason::Stale);
        prop_assert_eq!(reason(&limits(Some(bound), None), &facts), expected);
        prop_assert_eq!(reason(&limits(None, None), &facts), None);
    }

    #[test]
    fn a_longer_gradient_than_the_bound_is_rejected(bound in 0.1..100.0, norm in 0.0..200.0) {
        let facts = PushFacts { norm: Some(norm), ..PushFacts::default() };
        prop_assert_eq!(reason(&limits(None, Some(bound)), &facts), (norm > bound).then_some(Reason::Norm));
    }
}

#[test]
fn a_rejection_says_the_values() {
    let facts = PushFacts { staleness: 12, ..PushFacts::default() };
    let Verdict::Reject { detail, .. } = admit(&limits(Some(10), None), &facts) else { panic!("admitted") };
    assert!(detail.contains("12") && detail.contains("10"), "{detail}");
}

#[test]
fn a_norm_that_is_nan_is_rejected_and_one_not_yet_known_is_not_judged() {
    let spec = limits(None, Some(1.0));
    assert_eq!(
        reason(&spec, &PushFacts { norm: Some(f64::NAN), ..PushFacts::default() }),
        Some(Reason::Norm)
    );
    assert_eq!(reason(&spec, &PushFacts::default()), None);
}

#[test]
fn the_reason_that_explains_the_others_is_named() {
    let spec = limits(Some(0), Some(1.0));
    let mut facts =
        PushFacts { staleness: 9, same_term: false, awake: false, finite: false, norm: Some(f64::INFINITY) };
    let mut seen = Vec::new();
    let cures: [fn(&mut PushFacts); 5] = [
        |facts| facts.same_term = true,
        |facts| facts.awake = true,
        |facts| facts.finite = true,
        |facts| facts.staleness = 0,
        |facts| facts.norm = Some(0.5),
    ];
    for cure in cures {
        seen.extend(reason(&spec, &facts));
        cure(&mut facts);
    }
    let expected = [Reason::ServerRolledBack, Reason::Slept, Reason::NonFinite, Reason::Stale, Reason::Norm];
    assert_eq!(seen, expected);
    assert_eq!(reason(&spec, &facts), None);
}

#[test]
fn every_reason_has_one_name_in_json_and_in_text() {
    assert!(Reason::ALL.len() >= 13);
    for &reason in Reason::ALL {
        let name = reason.to_string();
        assert!(name.chars().all(|c| c.is_ascii_lowercase() || c == '_'), "{name}");
        assert_eq!(serde_json::to_string(&reason).unwrap(), format!("\"{name}\""));
        assert_eq!(serde_json::from_str::<Reason>(&format!("\"{name}\"")).unwrap(), reason);
        assert_eq!(Reason::ALL.iter().filter(|other| other.name() == name).count(), 1);
    }
}

#[test]
fn only_a_norm_needs_the_whole_push_and_makes_the_transaction_whole() {
    assert_eq!(need(&limits(Some(3), None)), Need::Header);
    assert_eq!(need(&limits(None, Some(1.0))), Need::Push);
    assert!(Need::Header < Need::Fragment && Need::Fragment < Need::Tensor && Need::Tensor < Need::Push);
    for requested in [Transaction::Fragment, Transaction::Model] {
        for less in [Need::Header, Need::Fragment, Need::Tensor] {
            assert_eq!(transaction(requested, less), requested);
        }
        assert_eq!(transaction(requested, Need::Push), Transaction::Model);
    }
}
