//! What a worker that has joined may send to a real server: pushes, pulls, calls, values, or no frames at all.

use crate::frames::{mended, message};
use crate::input::Input;
use crate::peer::Peer;
use crate::small;
use offbeat_core::spec::Transaction;
use offbeat_core::wire::Kind;
use offbeat_core::wire::message::{Join, Joined, Purpose};
use offbeat_net::server::{Server, ServerConfig, Snapshot};
use std::net::{Shutdown, TcpStream};
use std::sync::OnceLock;

/// Bits of the first byte.
const WHOLE_PUSHES: u8 = 1;
const WITHOUT_MODEL: u8 = 2;

/// The server goes on, and holds no parameter that is not finite.
///
/// # Panics
/// If one of that is not so.
pub fn session(bytes: &[u8]) {
    attacked(bytes, check);
}

/// What can be said of the server when the worker has gone.
fn attacked<R>(bytes: &[u8], then: impl FnOnce(&Server) -> R) -> R {
    let mut input = Input::new(bytes);
    let choice = input.byte();
    let frames = mended(input.rest());
    let bare;
    let server = if choice & WITHOUT_MODEL != 0 {
        bare = Server::start(config(Transaction::Fragment)).expect("the machine has a port");
        &bare
    } else {
        running(choice & WHOLE_PUSHES != 0)
    };
    let stream = TcpStream::connect(("127.0.0.1", server.address().port())).expect("the server listens");
    let mut peer = Peer::new(stream).expect("it is connected");
    peer.greet(Purpose::Data).expect("the server is well");
    let join = Join {
        worker_id: Some("w".into()),
        run_id: None,
        table: None,
        host: "here".into(),
        in_flight: 2,
        back: None,
        attempt: None,
    };
    peer.write(&message(Kind::Join, 0, &join)).expect("the server is well");
    let _: Joined = peer.expect(Kind::Joined).expect("the server is well");
    // It may end before it has read all.
    peer.write(&frames);
    peer.0.shutdown(Shutdown::Write).ok();
    peer.drain();
    then(server)
}

fn check(server: &Server) {
    let Some((_, tensors)) = server.tensors().expect("we are its process") else { return };
    let floats = tensors[0].as_chunks().0.iter().map(|b| f32::from_le_bytes(*b));
    let halves =
        tensors[1].as_chunks().0.iter().map(|b| f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16));
    assert!(floats.chain(halves).all(f32::is_finite), "a parameter is not finite");
}

fn config(transaction: Transaction) -> ServerConfig {
    ServerConfig {
        transaction,
        optimizer: Some(small::sgd(0.0)),
        num_data_threads: Some(1),
        ..ServerConfig::default()
    }
}

/// One for all inputs: to start one takes longer than to attack it.
fn running(whole_pushes: bool) -> &'static Server {
    static SERVERS: [OnceLock<Server>; 2] = [OnceLock::new(), OnceLock::new()];
    SERVERS[usize::from(whole_pushes)].get_or_init(|| {
        let transaction = if whole_pushes { Transaction::Model } else { Transaction::Fragment };
        let model = Snapshot::of(small::table(), &small::values()).expect("the values are the table's");
        Server::with_model(config(transaction), model).expect("the machine has a port")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seeds::seed_of;

    /// The model's version when the worker has gone; none without a model.
    fn version_after(name: &str) -> Option<u64> {
        attacked(&seed_of("session", name), |server| {
            check(server);
            server.tensors().unwrap()?;
            let status: serde_json::Value = serde_json::from_str(&server.status_json().unwrap()).unwrap();
            status["version"].as_u64()
        })
    }

    #[test]
    fn an_honest_push_moves_the_model_and_no_other_does() {
        let mut before = [0, 0];
        for (name, whole, updates) in [
            ("push", 0, 1),
            ("push-twice", 0, 2),
            ("push-of-some", 0, 1),
            ("push-whole", 1, 1),
            ("attack-not-finite", 0, 1), // all of it but a buffer of integers is left out
            ("attack-fragment-first", 0, 0),
            ("attack-gap", 0, 0),
            ("attack-large", 0, 2),
        ] {
            let version = version_after(name).unwrap();
            assert_eq!(version - before[whole], updates, "{name}");
            before[whole] = version;
        }
        assert_eq!(version_after("init"), Some(0), "the model was brought");
        assert_eq!(version_after("attack-values-unasked"), None);
    }
}
