//! Static documents of the server: the page at `/`, and `/openapi.json`.

use axum::{
    extract::Path,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};

use crate::error::{ApiError, Result};

const PAGE: &str = include_str!("page/page.html");
const OPENAPI: &str = include_str!("openapi.json");

/// The other files of the page: name, type and text.
const FILES: [(&str, &str, &str); 8] = [
    ("page.css", CSS, include_str!("page/page.css")),
    ("page.js", JAVASCRIPT, include_str!("page/page.js")),
    ("api.js", JAVASCRIPT, include_str!("page/api.js")),
    ("history.js", JAVASCRIPT, include_str!("page/history.js")),
    ("markdown.js", JAVASCRIPT, include_str!("page/markdown.js")),
    ("settings.js", JAVASCRIPT, include_str!("page/settings.js")),
    ("strip.js", JAVASCRIPT, include_str!("page/strip.js")),
    // Unmodified from npm. Its licences are in `page/markdown-it.LICENSE`.
    ("markdown-it.umd.min.js", JAVASCRIPT, include_str!("page/markdown-it.umd.min.js")),
];
const CSS: &str = "text/css; charset=utf-8";
const JAVASCRIPT: &str = "text/javascript; charset=utf-8";

/// Content security policy of the page: scripts, styles and requests only of its own server.
/// `require-trusted-types-for` prevents its scripts from parsing text as HTML, so that a model's answer stays text.
const POLICY: &str = "default-src 'none'; connect-src 'self'; script-src 'self'; style-src 'self'; img-src data:; \
                      form-action 'none'; frame-ancestors 'none'; base-uri 'none'; \
                      require-trusted-types-for 'script'; trusted-types 'none'";

/// Whether a path belongs to the page, which needs no API key.
pub(crate) fn is_page(path: &str) -> bool {
    path == "/" || path.strip_prefix("/page/").is_some_and(|name| FILES.iter().any(|(known, ..)| *known == name))
}

pub(crate) async fn page() -> Response {
    document("text/html; charset=utf-8", PAGE)
}

pub(crate) async fn page_file(Path(name): Path<String>) -> Result<Response> {
    let file = FILES.iter().find(|(known, ..)| *known == name);
    let missing = || ApiError::new(StatusCode::NOT_FOUND, "the page has no such file");
    file.map(|(_, kind, text)| document(kind, text)).ok_or_else(missing)
}

fn document(kind: &'static str, text: &'static str) -> Response {
    let headers = [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, text).into_response()
}

pub(crate) async fn openapi() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], OPENAPI).into_response()
}
