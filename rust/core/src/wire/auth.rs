//! Proof that both sides hold the run's token, without sending it: HMAC-SHA256 over both nonces, one label a
//! side, so that neither proof can be replayed as the other's or on another connection.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// Fresh random bytes, one set a connection and side.
pub type Nonce = [u8; 32];
/// What a side that holds the token can compute.
pub type Proof = [u8; 32];

/// Who proves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Server,
    Worker,
}

impl Side {
    const fn label(self) -> &'static [u8] {
        match self {
            Self::Server => b"offbeat server",
            Self::Worker => b"offbeat worker",
        }
    }
}

fn mac(token: &str, side: Side, worker: &Nonce, server: &Nonce) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(token.as_bytes()).expect("HMAC takes a key of any length");
    mac.update(side.label());
    mac.update(worker);
    mac.update(server);
    mac
}

/// This side's proof.
#[must_use]
pub fn prove(token: &str, side: Side, worker: &Nonce, server: &Nonce) -> Proof {
    mac(token, side, worker, server).finalize().into_bytes().into()
}

/// Whether `proof` is what `side` would have sent with our token; takes the same time whatever the bytes.
#[must_use]
pub fn verify(token: &str, side: Side, worker: &Nonce, server: &Nonce, proof: &[u8]) -> bool {
    mac(token, side, worker, server).verify_slice(proof).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORKER: Nonce = [1; 32];
    const SERVER: Nonce = [2; 32];

    #[test]
    fn a_proof_holds_for_its_token_side_and_nonces_only() {
        let proof = prove("secret", Side::Worker, &WORKER, &SERVER);
        assert!(verify("secret", Side::Worker, &WORKER, &SERVER, &proof));
        assert!(!verify("Secret", Side::Worker, &WORKER, &SERVER, &proof));
        assert!(!verify("secret", Side::Server, &WORKER, &SERVER, &proof));
        assert!(!verify("secret", Side::Worker, &SERVER, &WORKER, &proof));
        assert!(!verify("secret", Side::Worker, &WORKER, &SERVER, &proof[..31]));
        assert!(!verify("secret", Side::Worker, &WORKER, &SERVER, &[]));
    }
}
