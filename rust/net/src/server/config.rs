//! What a server is told at its start, and where it may listen: without a token only this machine is let in.

use super::error::ServerError;
use crate::token::Token;
use offbeat_core::pipeline;
use offbeat_core::spec::{OptimizerSpec, Schedule, StalenessSpec, Transaction};
use offbeat_core::store::StoreConfig;
use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::path::PathBuf;
use std::time::Duration;

/// Connections that may wait for the listener to take them.
const BACKLOG: i32 = 1024;

/// What a server tells its workers when it stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The run is over.
    Finished,
    /// It will come again, from its last checkpoint: they wait for it.
    Restarting,
}

/// How a server is set up. The defaults are for a run whose first worker brings the model and the optimizer.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// `None`: every interface with a token, loopback without.
    pub host: Option<String>,
    /// 0: any free port.
    pub port: u16,
    pub token: Option<Token>,
    /// Listen beyond loopback without a token.
    pub insecure: bool,
    /// `None`: a random one.
    pub run_id: Option<String>,
    pub transaction: Transaction,
    /// The run ends once tickets cover this many samples.
    pub max_samples: Option<u64>,
    pub staleness: StalenessSpec,
    pub schedule: Schedule,
    /// `None`: the first worker's.
    pub optimizer: Option<OptimizerSpec>,
    /// Whether workers keep SGD's momentum. `None`: where the optimizer has some.
    pub momentum_correction: Option<bool>,
    /// How to build the module, for workers that bring none.
    pub blueprint: Option<String>,
    /// A worker that is silent for so long is lost.
    pub lease: Duration,
    /// A connection on which nothing moves for so long in the middle of a frame is closed.
    pub progress_timeout: Duration,
    /// Time for a connection to prove that it may speak.
    pub handshake_timeout: Duration,
    /// How long nobody must be there before waiting for the workers ends.
    pub linger: Duration,
    /// How long a lost worker counts as there, since it may come back.
    pub rejoin_grace: Duration,
    /// How long a consistent copy waits for pushes that are under way.
    pub cut_deadline: Duration,
    /// Connections that have proved who they are.
    pub max_connections: usize,
    /// Connections that have not yet.
    pub max_pending: usize,
    pub max_workers: usize,
    /// Bytes for pushes under way with `transaction = model`. `None`: two pushes, and at least 64 MiB.
    pub staging_budget: Option<u64>,
    pub max_live_versions: usize,
    /// `None`: one a processor.
    pub num_data_threads: Option<usize>,
    /// `None`: what the server has learned ends with it.
    pub checkpoints: Option<CheckpointConfig>,
}

/// Where a server keeps its checkpoints, when it writes one, and whether it goes on from what is there. Besides, one is
/// written when the model is in place, and when the server stops.
#[derive(Clone, Debug)]
pub struct CheckpointConfig {
    /// For this server alone; made where it is not there.
    pub directory: PathBuf,
    pub every: Every,
    pub resume: Resume,
}

/// What is between two checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Every {
    /// So many updates, or a few more.
    Versions(u64),
    /// So much time, if there were updates.
    Time(Duration),
}

impl fmt::Display for Every {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Versions(number) => write!(f, "{number} updates"),
            Self::Time(time) => write!(f, "{time:?}"),
        }
    }
}

/// Whether a server goes on from the newest checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resume {
    /// If there is one.
    Auto,
    /// It begins anew; what is there is set aside.
    Never,
    /// Without one it does not start.
    Must,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            host: None,
            port: 0,
            token: None,
            insecure: false,
            run_id: None,
            transaction: Transaction::Fragment,
            max_samples: None,
            staleness: StalenessSpec::default(),
            schedule: Schedule::default(),
            optimizer: None,
            momentum_correction: None,
            blueprint: None,
            lease: Duration::from_secs(10),
            progress_timeout: Duration::from_secs(10),
            handshake_timeout: Duration::from_secs(5),
            linger: Duration::from_secs(10),
            rejoin_grace: Duration::from_secs(60),
            cut_deadline: Duration::from_secs(1),
            max_connections: 4096,
            max_pending: 64,
            max_workers: 1024,
            staging_budget: None,
            max_live_versions: 3,
            num_data_threads: None,
            checkpoints: None,
        }
    }
}

impl ServerConfig {
    /// Checks what can be checked before anything is started.
    pub(super) fn validate(&self) -> Result<(), ServerError> {
        self.staleness.validate()?;
        self.schedule.validate()?;
        let refuse = |name, value: String, remedy| Err(ServerError::Config { name, value, remedy });
        match self.run_id.as_deref() {
            Some(id) if id.is_empty() || id.len() > MAX_ID_BYTES => {
                return refuse("run_id", format!("{} bytes long", id.len()), "give 1 to 128 bytes");
            }
            _ => {}
        }
        if self.token.as_deref() == Some("") {
            return refuse("token", "empty".into(), "give a secret of some length, or None");
        }
        if self.max_samples == Some(0) {
            return refuse("max_samples", "0".into(), "give at least 1, or None for no end");
        }
        if self.num_data_threads == Some(0) {
            return refuse("num_data_threads", "0".into(), "give at least 1, or None for one a processor");
        }
        match self.checkpoints.as_ref().map(|checkpoints| checkpoints.every) {
            Some(Every::Versions(0)) => {
                return refuse("checkpoint_frequency", "0".into(), "give at least 1 update");
            }
            Some(Every::Time(Duration::ZERO)) => {
                return refuse("checkpoint_frequency", "0 s".into(), "give a time above 0");
            }
            _ => {}
        }
        for (name, time) in [("lease", self.lease), ("progress_timeout", self.progress_timeout)] {
            if time.is_zero() {
                return refuse(name, "0 s".into(), "give a time above 0");
            }
        }
        Ok(())
    }

    /// The transaction that serves both the user's choice and what the policies must see.
    pub(super) fn transaction(&self) -> Transaction {
        pipeline::transaction(self.transaction, pipeline::need(&self.staleness))
    }

    /// How its store is built.
    pub(super) fn store(&self) -> StoreConfig {
        StoreConfig {
            transaction: self.transaction(),
            max_workers: self.max_workers,
            max_live_versions: self.max_live_versions,
            ..StoreConfig::default()
        }
    }

    /// Opens the listening socket; where any port will do, at `usual` if that is free.
    pub(super) fn listen(&self, usual: Option<u16>) -> Result<TcpListener, ServerError> {
        match usual.filter(|_| self.port == 0).map(|port| (port, self.listen_at(port))) {
            None => self.listen_at(self.port),
            Some((port, Err(ServerError::AddressInUse { .. }))) => {
                tracing::warn!(
                    port,
                    "the port of before is in use: workers that look for the server there do not find it"
                );
                self.listen_at(0)
            }
            Some((_, listening)) => listening,
        }
    }

    fn listen_at(&self, port: u16) -> Result<TcpListener, ServerError> {
        let Some(host) = &self.host else {
            if self.token.is_none() {
                return bind(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port));
            }
            // Every interface: both protocols where the machine has both.
            return match bind(SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), port)) {
                Err(ServerError::Bind { .. }) => bind(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port)),
                other => other,
            };
        };
        let addresses: Vec<SocketAddr> = (host.as_str(), port)
            .to_socket_addrs()
            .map_err(|cause| ServerError::Host { host: host.clone(), cause })?
            .collect();
        let open = |address: &SocketAddr| !address.ip().to_canonical().is_loopback();
        if self.token.is_none() && !self.insecure && addresses.iter().any(open) {
            return Err(ServerError::Insecure { host: host.clone() });
        }
        let none = || io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        let mut failed = ServerError::Host { host: host.clone(), cause: none() };
        for address in addresses {
            match bind(address) {
                Ok(listener) => return Ok(listener),
                Err(error) => failed = error,
            }
        }
        Err(failed)
    }
}

/// Longest run and worker id.
pub(super) const MAX_ID_BYTES: usize = 128;

fn bind(address: SocketAddr) -> Result<TcpListener, ServerError> {
    let listen = || {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
        if address.ip() == IpAddr::V6(Ipv6Addr::UNSPECIFIED) {
            socket.set_only_v6(false)?;
        }
        // As std does: connections of the server before this one may linger in the kernel.
        socket.set_reuse_address(cfg!(unix))?;
        socket.bind(&SockAddr::from(address))?;
        socket.listen(BACKLOG)?;
        socket.set_nonblocking(true)?;
        Ok(TcpListener::from(socket))
    };
    listen().map_err(|cause: io::Error| match cause.kind() {
        io::ErrorKind::AddrInUse => ServerError::AddressInUse { address: address.to_string() },
        _ => ServerError::Bind { address: address.to_string(), cause },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listen(host: Option<&str>, token: bool, insecure: bool) -> Result<IpAddr, ServerError> {
        let config = ServerConfig {
            host: host.map(str::to_owned),
            token: token.then(|| "secret".into()),
            insecure,
            ..ServerConfig::default()
        };
        Ok(config.listen(None)?.local_addr().unwrap().ip())
    }

    #[test]
    fn a_token_is_not_shown() {
        let token = Some("of one's own".into());
        let shown = format!("{:?}", ServerConfig { token, port: 77, ..ServerConfig::default() });
        assert!(!shown.contains("one's own") && shown.contains("port: 77"), "{shown}");
        assert!(shown.contains("token: Some("), "{shown}");
        assert!(format!("{:?}", ServerConfig::default()).contains("token: None"));
    }

    #[test]
    fn without_a_token_the_default_host_is_loopback() {
        assert!(listen(None, false, false).unwrap().is_loopback());
        assert!(listen(None, false, true).unwrap().is_loopback());
    }

    #[test]
    fn with_a_token_the_default_host_is_every_interface() {
        assert!(listen(None, true, false).unwrap().is_unspecified());
    }

    #[test]
    fn another_host_needs_a_token_or_the_word_insecure() {
        assert!(
            matches!(listen(Some("0.0.0.0"), false, false), Err(ServerError::Insecure { host }) if host == "0.0.0.0")
        );
        assert!(listen(Some("0.0.0.0"), false, true).unwrap().is_unspecified());
        assert!(listen(Some("0.0.0.0"), true, false).unwrap().is_unspecified());
        assert!(listen(Some("localhost"), false, false).unwrap().is_loopback());
    }

    #[test]
    fn a_port_in_use_is_named() {
        let first = ServerConfig::default().listen(None).unwrap();
        let address = first.local_addr().unwrap();
        let config = ServerConfig { port: address.port(), ..ServerConfig::default() };
        let refused = config.listen(None).unwrap_err();
        assert!(
            matches!(&refused, ServerError::AddressInUse { address: named } if *named == address.to_string())
        );
    }

    #[test]
    fn a_host_that_is_not_ours_is_refused() {
        assert!(matches!(listen(Some("192.0.2.1"), true, false), Err(ServerError::Bind { .. })));
    }
}
