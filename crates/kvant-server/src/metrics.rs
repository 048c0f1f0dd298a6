//! `/metrics`: counts in Prometheus' text format, under the names of vLLM without their prefix.

use std::{
    collections::BTreeMap,
    fmt::Write,
    fs,
    sync::{Arc, Mutex, PoisonError},
};

use axum::{
    extract::State,
    http::header,
    response::{IntoResponse, Response},
};
use kvant_engine::{EngineStats, Histogram, Unit};

use crate::app::App;

pub(crate) async fn get(State(app): State<Arc<App>>) -> Response {
    let model = app.options.names.first().cloned().unwrap_or_default();
    let text = Text::new(&model).stats(&app.engine.stats());
    let text = text + &Text::new(&model).server(&app.statuses, app.started);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}

/// How often each status was answered.
#[derive(Default)]
pub(crate) struct Statuses(Mutex<BTreeMap<u16, u64>>);

impl Statuses {
    pub fn add(&self, status: u16) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(status).or_default() += 1;
    }

    fn counts(&self) -> BTreeMap<u16, u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Figures of the process from `/proc`; nothing on other systems than Linux.
#[derive(Default)]
struct Process {
    resident: Option<u64>,
    cpu_seconds: Option<f64>,
    open_files: Option<usize>,
}

impl Process {
    fn read() -> Process {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let kilobytes = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kilobytes = kilobytes.and_then(|text| text.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        // The fields after the name, which can have spaces; times are in hundredths of a second.
        let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
        let fields: Vec<&str> = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace().collect();
        let ticks = |index: usize| fields.get(index).and_then(|text| text.parse::<u64>().ok());
        Process {
            resident: kilobytes.map(|kilobytes| kilobytes * 1024),
            cpu_seconds: ticks(11).zip(ticks(12)).map(|(user, system)| (user + system) as f64 / 100.0),
            open_files: fs::read_dir("/proc/self/fd").ok().map(Iterator::count),
        }
    }
}

/// Metrics as text.
struct Text {
    out: String,
    /// The label of the model.
    label: String,
}

impl Text {
    fn new(model: &str) -> Text {
        let escaped = model.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n");
        Text { out: String::new(), label: format!("model_name=\"{escaped}\"") }
    }

    fn stats(mut self, stats: &EngineStats) -> String {
        let share = stats.pages_used as f64 / (stats.pages_bytes as f64).max(1.0);
        self.gauge("num_requests_running", "Requests that run", stats.running as f64);
        self.gauge("num_requests_waiting", "Requests that wait", stats.waiting as f64);
        self.gauge("num_requests_paused", "Requests whose events nobody reads", stats.paused as f64);
        self.gauge("kv_cache_usage_perc", "Share of the KV pages in use, 0 to 1, cached prefixes included", share);
        self.gauge("kv_cache_bytes", "Bytes of all KV pages", stats.pages_bytes as f64);
        self.gauge(
            "kv_cache_used_bytes",
            "Bytes of KV pages in use, cached prefixes included",
            stats.pages_used as f64,
        );
        self.gauge("kv_cache_request_bytes", "Bytes of KV pages that requests use", stats.requests_used as f64);
        self.gauge("kv_cache_host_bytes", "Bytes of KV pages in host memory", stats.host_used as f64);
        self.counter("prefix_cache_queries", "Tokens looked up in the prefix cache", stats.prefix_queries);
        self.counter("prefix_cache_hits", "Tokens that the prefix cache had", stats.prefix_hits);
        self.counter("num_preemptions", "Requests that gave their pages back before their end", stats.preemptions);
        self.counter("prompt_tokens", "Tokens of prompts that were computed", stats.prompt_tokens);
        self.counter("generation_tokens", "Tokens generated", stats.generated_tokens);
        self.counter("engine_steps", "Steps of the engine", stats.steps);
        self.counter("spec_decode_num_draft_tokens", "Draft tokens that were tried", stats.drafts[0]);
        self.counter("spec_decode_num_accepted_tokens", "Draft tokens that were right", stats.drafts[1]);
        self.head("request_success_total", "Ended requests", "counter");
        let reasons = [
            ("stop", stats.finished_stop),
            ("length", stats.finished_length),
            ("abort", stats.finished_cancelled),
            ("error", stats.finished_failed),
        ];
        for (reason, count) in reasons {
            let labels = format!(",finished_reason=\"{reason}\"");
            self.value("request_success_total", &labels, count as f64);
        }
        self.histogram("time_to_first_token_seconds", "Time to the first token", &stats.time_to_first_token);
        self.histogram("inter_token_latency_seconds", "Time between two tokens of a request", &stats.inter_token);
        self.histogram("e2e_request_latency_seconds", "Time of a request", &stats.request_time);
        self.histogram("request_queue_time_seconds", "Time of a request before its first step", &stats.queue_time);
        self.histogram(
            "request_prefill_time_seconds",
            "Time from the first step to the first token",
            &stats.prefill_time,
        );
        self.histogram("request_decode_time_seconds", "Time from the first token to the last", &stats.decode_time);
        self.histogram("request_prompt_tokens", "Tokens of a prompt", &stats.prompt_lengths);
        self.histogram("request_generation_tokens", "Tokens of a text", &stats.text_lengths);
        self.out
    }

    /// What the server and the system count.
    fn server(mut self, statuses: &Statuses, started: u64) -> String {
        self.head("http_requests_total", "Answers by their status", "counter");
        for (status, count) in statuses.counts() {
            self.value("http_requests_total", &format!(",status=\"{status}\""), count as f64);
        }
        self.gauge("process_start_time_seconds", "When the server started, in seconds since 1970", started as f64);
        let process = Process::read();
        if let Some(bytes) = process.resident {
            self.gauge("process_resident_memory_bytes", "Memory of the process", bytes as f64);
        }
        if let Some(seconds) = process.cpu_seconds {
            self.head("process_cpu_seconds_total", "Time of processors", "counter");
            self.value("process_cpu_seconds_total", "", seconds);
        }
        if let Some(count) = process.open_files {
            self.gauge("process_open_fds", "Open files and connections", count as f64);
        }
        self.out
    }

    fn head(&mut self, name: &str, help: &str, kind: &str) {
        // Writing to a string does not fail.
        let _ = writeln!(self.out, "# HELP {name} {help}.\n# TYPE {name} {kind}");
    }

    fn value(&mut self, name: &str, labels: &str, value: f64) {
        let _ = writeln!(self.out, "{name}{{{}{labels}}} {value}", self.label);
    }

    fn gauge(&mut self, name: &str, help: &str, value: f64) {
        self.head(name, help, "gauge");
        self.value(name, "", value);
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) {
        let name = format!("{name}_total");
        self.head(&name, help, "counter");
        self.value(&name, "", value as f64);
    }

    fn histogram<U: Unit>(&mut self, name: &str, help: &str, histogram: &Histogram<U>) {
        self.head(name, help, "histogram");
        for (bound, count) in histogram.cumulative() {
            let bound = if bound.is_infinite() { "+Inf".to_string() } else { bound.to_string() };
            self.value(&format!("{name}_bucket"), &format!(",le=\"{bound}\""), count as f64);
        }
        self.value(&format!("{name}_sum"), "", histogram.sum());
        self.value(&format!("{name}_count"), "", histogram.count() as f64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_format() {
        let text = Text::new("a\"b\\c\nd").stats(&EngineStats::default());
        assert!(text.contains("num_requests_running{model_name=\"a\\\"b\\\\c\\nd\"} 0\n"));
        assert!(text.contains("request_success_total{model_name=\"a\\\"b\\\\c\\nd\",finished_reason=\"stop\"} 0\n"));
        assert!(text.contains("# TYPE time_to_first_token_seconds histogram\n"));
        assert!(text.contains(",le=\"+Inf\"} 0\n"));
        // Every name has a type before its first value.
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let name = line.split('{').next().unwrap();
            let base = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name);
            let typed = text.contains(&format!("# TYPE {base} ")) || text.contains(&format!("# TYPE {name} "));
            assert!(typed, "{line}");
        }
    }
}
