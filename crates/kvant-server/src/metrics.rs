//! `/metrics`: counters in Prometheus' text format. Metrics with vLLM's meaning have vLLM's names, prefix included,
//! because routers read these; kvant's own have the prefix `kvant:`.

use std::{fmt::Write, fs, sync::Arc};

use axum::{
    extract::State,
    http::header,
    response::{IntoResponse, Response},
};
use kvant_engine::{EngineStats, Histogram, Unit};

use crate::{
    app::App,
    models::{Known, Seen},
    statuses::Statuses,
};

pub(crate) async fn get(State(app): State<Arc<App>>) -> Response {
    let seen = app.models.seen();
    let loaded = |(known, seen): (Arc<Known>, Seen)| seen.stats.map(|stats| (label(known.name()), stats));
    let text = Text::models(&seen, app.models.bytes());
    let text = text + &Text::stats(&seen.into_iter().filter_map(loaded).collect::<Vec<_>>());
    let text = text + &Text::server(&own_label(&app), &app.statuses, app.started);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}

/// The label of a model.
fn label(model: &str) -> String {
    let escaped = model.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n");
    format!("model_name=\"{escaped}\"")
}

/// The label of metrics of the whole server: its model, if it has only one.
fn own_label(app: &App) -> String {
    match &app.models.known()[..] {
        [one] => label(one.name()),
        _ => String::new(),
    }
}

/// Metrics of the process from `/proc`. Empty on systems other than Linux.
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
        // The fields after the process name, which can contain spaces. Times are in hundredths of a second.
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
#[derive(Default)]
struct Text(String);

impl Text {
    /// Load state and load counts of the models.
    fn models(seen: &[(Arc<Known>, Seen)], bytes: usize) -> String {
        let mut text = Text::default();
        let of = |value: fn(&Seen) -> u64| {
            let values = seen.iter().map(move |(known, seen)| (label(known.name()), value(seen) as f64));
            values.collect::<Vec<_>>()
        };
        let is_loaded = of(|seen| u64::from(seen.stats.is_some()));
        text.values("kvant:model_loaded", "Whether a model is loaded", "gauge", &is_loaded);
        text.values("kvant:model_loads_total", "Loads of a model on demand", "counter", &of(|seen| seen.loads.done));
        let failed = of(|seen| seen.loads.failed);
        text.values("kvant:model_load_failures_total", "Failed loads of a model", "counter", &failed);
        let of_all = [(String::new(), bytes as f64)];
        text.values("kvant:models_bytes", "Bytes of the models loaded on demand", "gauge", &of_all);
        text.0
    }

    /// Metrics of the engines, each labelled with its model.
    fn stats(models: &[(String, EngineStats)]) -> String {
        let mut text = Text::default();
        for (name, help, value) in GAUGES {
            text.values(name, help, "gauge", &of_each(models, *value));
        }
        for (name, help, value) in COUNTERS {
            text.values(name, help, "counter", &of_each(models, |stats| value(stats) as f64));
        }
        text.head("vllm:cache_config_info", "Tokens of a KV page, and pages of one text that fit together", "gauge");
        for (label, stats) in models {
            let label = joined(label, "block_size", &stats.page_tokens.to_string());
            text.value("vllm:cache_config_info", &joined(&label, "num_gpu_blocks", &stats.pages.to_string()), 1.0);
        }
        let name = "vllm:spec_decode_num_accepted_tokens_per_pos_total";
        text.head(name, "Accepted draft tokens by their position in a draft", "counter");
        for (label, stats) in models {
            for (position, &count) in stats.drafts.accepted_at.iter().enumerate().take(stats.max_drafts) {
                text.value(name, &joined(label, "position", &position.to_string()), count as f64);
            }
        }
        text.head("vllm:request_success_total", "Ended requests", "counter");
        for (label, stats) in models {
            for (reason, count) in [
                ("stop", stats.finished_stop),
                ("length", stats.finished_length),
                ("abort", stats.finished_cancelled),
                ("error", stats.finished_failed),
            ] {
                text.value("vllm:request_success_total", &joined(label, "finished_reason", reason), count as f64);
            }
        }
        text.histograms("vllm:time_to_first_token_seconds", "Time to the first token", models, |s| {
            &s.time_to_first_token
        });
        text.histograms("vllm:inter_token_latency_seconds", "Time between two tokens of a request", models, |s| {
            &s.inter_token
        });
        text.histograms("vllm:e2e_request_latency_seconds", "End-to-end time of a request", models, |s| {
            &s.request_time
        });
        let help = "Time of a request before its first step";
        text.histograms("vllm:request_queue_time_seconds", help, models, |s| &s.queue_time);
        let help = "Time from the first step to the first token";
        text.histograms("vllm:request_prefill_time_seconds", help, models, |s| &s.prefill_time);
        let help = "Time from the first token to the last";
        text.histograms("vllm:request_decode_time_seconds", help, models, |s| &s.decode_time);
        text.histograms("vllm:request_prompt_tokens", "Prompt tokens of a request", models, |s| &s.prompt_lengths);
        text.histograms("vllm:request_generation_tokens", "Generated tokens of a request", models, |s| &s.text_lengths);
        text.0
    }

    /// Metrics of the server and the process.
    fn server(label: &str, statuses: &Statuses, started: u64) -> String {
        let mut text = Text::default();
        text.head("http_requests_total", "Responses by status", "counter");
        for (status, count) in statuses.counts() {
            text.value("http_requests_total", &joined(label, "status", &status.to_string()), count as f64);
        }
        let mut one = |name, help, kind, value| text.values(name, help, kind, &[(label.to_string(), value)]);
        let help = "Start time of the server, in seconds since 1970";
        one("process_start_time_seconds", help, "gauge", started as f64);
        let process = Process::read();
        if let Some(bytes) = process.resident {
            one("process_resident_memory_bytes", "Memory of the process", "gauge", bytes as f64);
        }
        if let Some(seconds) = process.cpu_seconds {
            one("process_cpu_seconds_total", "CPU time of the process", "counter", seconds);
        }
        if let Some(count) = process.open_files {
            one("process_open_fds", "Open files and connections", "gauge", count as f64);
        }
        text.0
    }

    fn head(&mut self, name: &str, help: &str, kind: &str) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.0, "# HELP {name} {help}.\n# TYPE {name} {kind}");
    }

    fn value(&mut self, name: &str, labels: &str, value: f64) {
        let _ = match labels {
            "" => writeln!(self.0, "{name} {value}"),
            labels => writeln!(self.0, "{name}{{{labels}}} {value}"),
        };
    }

    /// A metric with one value per label.
    fn values(&mut self, name: &str, help: &str, kind: &str, values: &[(String, f64)]) {
        self.head(name, help, kind);
        for (label, value) in values {
            self.value(name, label, *value);
        }
    }

    fn histograms<U: Unit>(
        &mut self,
        name: &str,
        help: &str,
        models: &[(String, EngineStats)],
        of: impl Fn(&EngineStats) -> &Histogram<U>,
    ) {
        self.head(name, help, "histogram");
        for (label, stats) in models {
            let histogram = of(stats);
            for (bound, count) in histogram.cumulative() {
                let bound = if bound.is_infinite() { "+Inf".to_string() } else { bound.to_string() };
                self.value(&format!("{name}_bucket"), &joined(label, "le", &bound), count as f64);
            }
            self.value(&format!("{name}_sum"), label, histogram.sum());
            self.value(&format!("{name}_count"), label, histogram.count() as f64);
        }
    }
}

/// Joins two labels.
fn joined(label: &str, name: &str, value: &str) -> String {
    let separator = if label.is_empty() { "" } else { "," };
    format!("{label}{separator}{name}=\"{value}\"")
}

fn of_each(models: &[(String, EngineStats)], value: impl Fn(&EngineStats) -> f64) -> Vec<(String, f64)> {
    models.iter().map(|(label, stats)| (label.clone(), value(stats))).collect()
}

/// Name, help and value of a metric.
type Metric<T> = (&'static str, &'static str, fn(&EngineStats) -> T);

const GAUGES: &[Metric<f64>] = &[
    ("vllm:num_requests_running", "Running requests", |s| s.running as f64),
    ("vllm:num_requests_waiting", "Waiting requests", |s| s.waiting as f64),
    ("kvant:num_requests_paused", "Requests paused because their events are not read", |s| s.paused as f64),
    // Without cached prefixes, which make room for requests: routers avoid servers that seem full.
    ("vllm:kv_cache_usage_perc", "Share of the KV pages that requests use, 0 to 1", |s| {
        s.requests_used as f64 / (s.pages_bytes as f64).max(1.0)
    }),
    ("kvant:kv_cache_bytes", "Bytes of all KV pages", |s| s.pages_bytes as f64),
    ("kvant:kv_cache_used_bytes", "Bytes of KV pages in use, cached prefixes included", |s| s.pages_used as f64),
    ("kvant:kv_cache_state_bytes", "Bytes of recurrent states among these", |s| s.states_used as f64),
    ("kvant:kv_cache_request_bytes", "Bytes of KV pages that requests use", |s| s.requests_used as f64),
    ("kvant:kv_cache_host_bytes", "Bytes of KV pages in host memory", |s| s.host_used as f64),
    ("kvant:kv_cache_disk_bytes", "Bytes of KV pages on disk, of all models", |s| s.stored as f64),
];

const COUNTERS: &[Metric<u64>] = &[
    ("vllm:prefix_cache_queries_total", "Tokens looked up in the prefix cache", |s| s.prefix_queries),
    ("vllm:prefix_cache_hits_total", "Tokens found in the prefix cache", |s| s.prefix_hits),
    ("vllm:num_preemptions_total", "Preemptions: running requests whose pages were taken back", |s| s.preemptions),
    ("vllm:prompt_tokens_total", "Prompt tokens computed", |s| s.prompt_tokens),
    ("vllm:generation_tokens_total", "Tokens generated", |s| s.generated_tokens),
    ("kvant:engine_steps_total", "Steps of the engine", |s| s.steps),
    ("vllm:spec_decode_num_drafts_total", "Drafts: runs of draft tokens of a request in a step", |s| s.drafts.rows),
    ("vllm:spec_decode_num_draft_tokens_total", "Proposed draft tokens", |s| s.drafts.tokens),
    ("vllm:spec_decode_num_accepted_tokens_total", "Accepted draft tokens", |s| s.drafts.accepted),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_format() {
        let models = ["a\"b\\c\nd", "other"].map(|name| (label(name), EngineStats::default()));
        let text = Text::stats(&models);
        // Without drafts there are no positions.
        assert!(!text.contains("per_pos_total{"));
        assert!(text.contains("vllm:num_requests_running{model_name=\"a\\\"b\\\\c\\nd\"} 0\n"));
        assert!(
            text.contains("vllm:request_success_total{model_name=\"a\\\"b\\\\c\\nd\",finished_reason=\"stop\"} 0\n")
        );
        assert!(text.contains("# TYPE vllm:time_to_first_token_seconds histogram\n"));
        assert!(text.contains(",le=\"+Inf\"} 0\n"));
        assert!(text.contains("vllm:request_success_total{model_name=\"other\",finished_reason=\"stop\"} 0\n"));
        // A name has only one type, for all models.
        assert_eq!(text.matches("# TYPE vllm:num_requests_running gauge\n").count(), 1);
        // Every name has a type before its first value.
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let name = line.split('{').next().unwrap();
            let base = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name);
            let typed = text.contains(&format!("# TYPE {base} ")) || text.contains(&format!("# TYPE {name} "));
            assert!(typed, "{line}");
        }
    }
}
