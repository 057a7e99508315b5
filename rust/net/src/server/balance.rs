//! Which data connections go to another thread. A connection is placed when it comes, by what is known then; workers
//! that leave, or that push more than others, leave some threads busier than others. What is decided here is asked for
//! ([`Connection::ask_to_move`](super::connection::Connection::ask_to_move)), and done between two frames ([`attend`](super::attend)).

/// What a connection weighs for being there, in bytes: idle ones are spread as well, before they wake together.
const PRESENCE_BYTES: u64 = 64 << 10;
/// A plan is worth it if it takes this part off some thread's load. Less is noise, and a thread's cache is worth something.
const LEAST_PART: u64 = 8;
/// Looks at the clock between two decisions. What has moved shows in the bytes after that.
const LOOKS_PER_DECISION: u32 = 4;

/// A connection, and the thread that serves it or that it was asked to move to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Served {
    pub(super) number: u64,
    pub(super) thread: usize,
    /// Bytes moved recently; far below 2⁴⁸.
    pub(super) recent_bytes: u64,
}

/// A connection that is to be served by another thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Move {
    pub(super) number: u64,
    pub(super) to: usize,
}

/// Decides every few looks, and only what it would have decided the time before as well.
#[derive(Debug, Default)]
pub(super) struct Balance {
    looks: u32,
    was_uneven: bool,
}

impl Balance {
    /// Another look; `served` is asked where a decision is due.
    pub(super) fn look(&mut self, num_threads: usize, served: impl FnOnce() -> Vec<Served>) -> Vec<Move> {
        self.looks += 1;
        if num_threads < 2 || self.looks < LOOKS_PER_DECISION {
            return Vec::new();
        }
        self.looks = 0;
        let moves = plan(num_threads, &served());
        // A pause of some workers, or a burst, is over by then.
        let was_uneven = std::mem::replace(&mut self.was_uneven, !moves.is_empty());
        if was_uneven { moves } else { Vec::new() }
    }
}

/// What one thread serves.
struct Thread {
    load: u64,
    /// (weight, number), lightest first, of those that have not been moved.
    own: Vec<(u64, u64)>,
}

impl Thread {
    /// The connection whose move to a thread with `idlest` takes most off the peak of both: the heaviest that does not
    /// turn the two around, or the lightest if what then is the peak is less by [`LEAST_PART`].
    fn choose(&self, idlest: u64) -> Option<usize> {
        let gap = self.load.saturating_sub(idlest);
        match self.own.partition_point(|(weight, _)| *weight <= gap / 2) {
            0 => self.own.first().is_some_and(|(w, _)| is_less(idlest + w, self.load)).then_some(0),
            n => Some(n - 1),
        }
    }
}

/// Whether a load has fallen by so much that it was worth something. Nothing can be taken off a thread without load.
const fn is_less(load: u64, before: u64) -> bool {
    load < before && load <= before - before.div_ceil(LEAST_PART)
}

/// Takes connections from the busiest threads to the idlest as long as that helps. Each moves once at most, and none if
/// all together they help no thread enough.
fn plan(num_threads: usize, served: &[Served]) -> Vec<Move> {
    let mut threads: Vec<Thread> = (0..num_threads).map(|_| Thread { load: 0, own: Vec::new() }).collect();
    for connection in served {
        let weight = connection.recent_bytes + PRESENCE_BYTES;
        let Some(thread) = threads.get_mut(connection.thread) else { continue };
        thread.load += weight;
        thread.own.push((weight, connection.number));
    }
    for thread in &mut threads {
        thread.own.sort_unstable();
    }
    let before: Vec<u64> = threads.iter().map(|thread| thread.load).collect();
    let mean = before.iter().sum::<u64>() / num_threads as u64;
    let mut may_give: Vec<usize> = (0..num_threads).filter(|&i| before[i] > mean).collect();
    let mut moves = Vec::new();
    while let Some(&busiest) = may_give.iter().max_by_key(|&&i| threads[i].load) {
        let Some(idlest) = (0..num_threads).min_by_key(|&i| threads[i].load) else { break };
        match threads[busiest].choose(threads[idlest].load) {
            Some(chosen) => {
                let (weight, number) = threads[busiest].own.remove(chosen);
                threads[busiest].load -= weight;
                threads[idlest].load += weight;
                moves.push(Move { number, to: idlest });
            }
            None => may_give.retain(|&i| i != busiest),
        }
        may_give.retain(|&i| threads[i].load > mean);
    }
    let is_worth_it = threads.iter().zip(&before).any(|(thread, &before)| is_less(thread.load, before));
    if is_worth_it { moves } else { Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn served(threads: &[usize], bytes: impl Fn(usize) -> u64) -> Vec<Served> {
        let connection = |(i, &thread)| Served { number: i as u64, thread, recent_bytes: bytes(i) };
        threads.iter().enumerate().map(connection).collect()
    }

    fn follow(served: &mut [Served], moves: &[Move]) {
        let to: BTreeMap<u64, usize> = moves.iter().map(|m| (m.number, m.to)).collect();
        assert_eq!(to.len(), moves.len(), "each moves once");
        for connection in served {
            if let Some(&to) = to.get(&connection.number) {
                assert_ne!(connection.thread, to);
                connection.thread = to;
            }
        }
    }

    fn loads(num_threads: usize, served: &[Served]) -> Vec<u64> {
        let mut loads = vec![0; num_threads];
        for connection in served {
            loads[connection.thread] += connection.recent_bytes + PRESENCE_BYTES;
        }
        loads
    }

    fn counts(num_threads: usize, served: &[Served]) -> Vec<usize> {
        (0..num_threads).map(|i| served.iter().filter(|c| c.thread == i).count()).collect()
    }

    prop_compose! {
        fn anything()(num_threads in 1_usize..9)(
            connections in prop::collection::vec((0..num_threads, prop_oneof![Just(0), 0_u64..1 << 40]), 0..80),
            num_threads in Just(num_threads),
        ) -> (usize, Vec<Served>) {
            let connection = |(i, (thread, recent_bytes))| Served { number: i as u64, thread, recent_bytes };
            (num_threads, connections.into_iter().enumerate().map(connection).collect())
        }
    }

    proptest! {
        #[test]
        fn no_thread_gets_busier_than_the_busiest_was_and_moves_come_to_an_end(
            (num_threads, mut served) in anything(),
        ) {
            let squares = |served: &[Served]| -> u128 {
                loads(num_threads, served).iter().map(|&l| u128::from(l).pow(2)).sum()
            };
            for _ in 0..served.len() + 2 {
                let (peak, before) = (loads(num_threads, &served).into_iter().max(), squares(&served));
                let moves = plan(num_threads, &served);
                if moves.is_empty() {
                    return Ok(());
                }
                follow(&mut served, &moves);
                prop_assert!(loads(num_threads, &served).into_iter().max() <= peak);
                prop_assert!(squares(&served) < before, "or it could go round and round");
            }
            prop_assert!(false, "there is always another move");
        }

        #[test]
        fn connections_that_move_as_much_are_spread_evenly(
            num_threads in 2_usize..9, num in 0_usize..300, bytes in prop_oneof![Just(0), 1_u64..1 << 30],
        ) {
            let mut served = served(&vec![0; num], |_| bytes);
            let moves = plan(num_threads, &served);
            follow(&mut served, &moves);
            let counts = counts(num_threads, &served);
            let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
            prop_assert!(most - least <= 1, "{:?}", counts);
        }

        #[test]
        fn noise_moves_nothing(
            num_threads in 2_usize..9, each in 1_usize..40, parts in prop::collection::vec(940_u64..=1060, 320),
        ) {
            let threads: Vec<usize> = (0..num_threads * each).map(|i| i % num_threads).collect();
            let served = served(&threads, |i| 1000 * parts[i] - 940 * 60);
            prop_assert_eq!(plan(num_threads, &served), vec![]);
        }
    }

    #[test]
    fn one_that_is_all_the_load_stays() {
        for others in 0..3 {
            let mut threads = vec![0];
            threads.extend(vec![1; others]);
            assert_eq!(plan(2, &served(&threads, |i| if i == 0 { 1 << 30 } else { 0 })), []);
        }
    }

    #[test]
    fn a_thread_that_stays_empty_makes_no_move_worth_it() {
        for num_threads in 2..9 {
            let served = served(&[0, 0], |i| if i == 0 { 1 << 30 } else { 0 });
            assert_eq!(plan(num_threads, &served), [], "{num_threads} threads");
        }
    }

    #[test]
    fn a_thread_that_can_give_nothing_keeps_no_other_from_giving() {
        // Thread 0 has one heavy connection, thread 1 four lighter ones, thread 2 nothing.
        let served = served(&[0, 1, 1, 1, 1], |i| if i == 0 { 10 << 30 } else { 2 << 30 });
        let moves = plan(3, &served);
        assert_eq!(moves.iter().map(|m| m.to).collect::<Vec<_>>(), [2, 2]);
    }

    #[test]
    fn what_is_uneven_once_is_let_be() {
        let uneven = || served(&[0, 0, 0, 0], |_| 1 << 20);
        let even = || served(&[0, 1, 0, 1], |_| 1 << 20);
        let mut balance = Balance::default();
        let mut decide = |served: fn() -> Vec<Served>| {
            for _ in 1..LOOKS_PER_DECISION {
                assert_eq!(balance.look(2, || panic!("it is not time")), []);
            }
            balance.look(2, served).len()
        };
        let turns: [fn() -> Vec<Served>; 5] = [uneven, even, uneven, uneven, even];
        assert_eq!(turns.map(&mut decide), [0, 0, 0, 2, 0]);
    }
}
