//! Host names by which clients can reach the server.

use std::net::{IpAddr, Ipv6Addr};

use axum::http::{HeaderMap, StatusCode, header};

use crate::error::{ApiError, Result};

/// Rejects a request whose `Host` is not one of `names`, localhost or an address.
///
/// This prevents DNS rebinding: a page of `evil.example` can make its name resolve to 127.0.0.1, and the browser then
/// lets the page read the responses of a server there. The browser sends the page's name as `Host`.
pub(crate) fn check(names: &[String], headers: &HeaderMap) -> Result<()> {
    // Browsers always send the header.
    let Some(host) = headers.get(header::HOST) else { return Ok(()) };
    let name = host.to_str().map(name_of).unwrap_or_default();
    if is_local(name) || names.iter().any(|known| known.eq_ignore_ascii_case(name)) {
        return Ok(());
    }
    let message = "this server does not answer to the name in the header Host: start it with --allowed-host NAME";
    Err(ApiError { code: Some("host_not_allowed"), ..ApiError::new(StatusCode::FORBIDDEN, message) })
}

/// A host without its port.
fn name_of(host: &str) -> &str {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => host,
    };
    name.strip_suffix('.').unwrap_or(name)
}

fn is_local(name: &str) -> bool {
    let v6 = name.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    let is_address = name.parse::<IpAddr>().is_ok() || v6.is_some_and(|v6| v6.parse::<Ipv6Addr>().is_ok());
    // Resolvers resolve `x.localhost` locally.
    let last = name.rsplit('.').next().unwrap_or_default();
    is_address || last.eq_ignore_ascii_case("localhost")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_a_page_cannot_have() {
        let check = |host: &str| {
            let headers = HeaderMap::from_iter([(header::HOST, host.parse().unwrap())]);
            check(&["Box.example".to_string()], &headers).is_ok()
        };
        for host in [
            "localhost",
            "LOCALHOST:8080",
            "a.localhost:1",
            "localhost.",
            "127.0.0.1",
            "127.0.0.1:8080",
            "[::1]",
            "[::1]:8080",
            "192.168.1.7:80",
            "box.example",
            "box.example:8080",
        ] {
            assert!(check(host), "{host}");
        }
        for host in
            ["evil.example", "localhost.evil.example", "notlocalhost", "127.0.0.1.evil.example", "", ":80", "[x]"]
        {
            assert!(!check(host), "{host}");
        }
        assert!(super::check(&[], &HeaderMap::new()).is_ok());
    }
}
