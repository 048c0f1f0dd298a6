//! The addresses of sockets, with vLLM's rule which of them are bound.

use std::net::IpAddr;

/// An address that ZeroMQ cannot use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected an address as in tcp://*:5557, got {0:?}")]
pub struct AddressError(String);

/// The use of an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Address {
    /// Listens there, for subscribers that connect.
    Bind(String),
    /// Connects to a subscriber that listens there.
    Connect(String),
}

impl Address {
    /// `*` and addresses of this machine alone are bound; a socket connects to all others.
    pub fn parse(text: &str) -> Result<Address, AddressError> {
        let error = || AddressError(text.to_string());
        let (host, port) = text.strip_prefix("tcp://").and_then(|rest| rest.rsplit_once(':')).ok_or_else(error)?;
        let port: u16 = port.parse().map_err(|_| error())?;
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let own = |ip: IpAddr| ip.is_unspecified() || ip.is_loopback();
        match bare.parse::<IpAddr>() {
            _ if host == "*" => Ok(Address::Bind(format!("tcp://0.0.0.0:{port}"))),
            Ok(ip) if own(ip) => Ok(Address::Bind(format!("tcp://{host}:{port}"))),
            Ok(_) => Ok(Address::Connect(text.to_string())),
            Err(_) if is_name(host) => Ok(Address::Connect(text.to_string())),
            Err(_) => Err(error()),
        }
    }
}

fn is_name(host: &str) -> bool {
    let is_label = |label: &str| !label.is_empty() && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    host.split('.').all(is_label)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        for (text, bound) in [
            ("tcp://*:5557", "tcp://0.0.0.0:5557"),
            ("tcp://0.0.0.0:0", "tcp://0.0.0.0:0"),
            ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5557"),
            ("tcp://[::]:5557", "tcp://[::]:5557"),
        ] {
            assert_eq!(Address::parse(text), Ok(Address::Bind(bound.to_string())));
        }
        for text in ["tcp://router:5557", "tcp://a.svc.cluster.local:1", "tcp://10.0.0.7:5557"] {
            assert_eq!(Address::parse(text), Ok(Address::Connect(text.to_string())));
        }
        for text in ["", "tcp://", "tcp://*", "*:5557", "tcp://*:65536", "ipc:///tmp/x", "tcp://a b:1", "tcp://:1"] {
            assert_eq!(Address::parse(text), Err(AddressError(text.to_string())));
        }
    }
}
