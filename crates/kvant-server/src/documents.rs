//! Documents that are part of the server: the page at `/` and `/openapi.json`.

use axum::{
    http::header,
    response::{IntoResponse, Response},
};

const PAGE: &str = include_str!("page.html");
const OPENAPI: &str = include_str!("openapi.json");

/// The page runs its own script and asks its own server, and nothing else.
const POLICY: &str = "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; \
                      img-src data:; form-action 'none'; frame-ancestors 'none'; base-uri 'none'";

pub(crate) async fn page() -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, PAGE).into_response()
}

pub(crate) async fn openapi() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], OPENAPI).into_response()
}
