//! The report as one HTML file that contains its plots.

use std::fmt::Write;

use super::{
    data::{AnswerData, NeedleData, ReportData},
    plots,
};
use crate::Result;

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:820px;margin:2em auto;padding:0 1em;color:#222;\
background:#fff}h1{font-size:1.4em}h2{font-size:1.1em;margin-top:2em}table{border-collapse:collapse}\
td,th{padding:.2em .7em;text-align:right;border-bottom:1px solid #ddd}\
td:first-child,th:first-child{text-align:left;max-width:14em;overflow-wrap:anywhere}\
svg{width:100%;max-width:700px;height:auto}.table{overflow-x:auto}\
@media(max-width:600px){body{margin:1em auto}td,th{padding:.2em .4em;font-size:.9em}\
td:first-child,th:first-child{max-width:8em}}";

/// The page.
pub fn html(data: &ReportData) -> Result<String> {
    let mut page = String::new();
    write!(
        page,
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"><title>KV cache types</title>\
         <style>{STYLE}</style></head>\n<body><h1>Cost of KV cache types</h1>\n<p>{}; {} tokens in windows of up to \
         {}. KL is the divergence, in nats, of the next-token distribution from the one with an f32 cache.</p>\n",
        escape(&data.subject),
        data.tokens,
        data.window_tokens
    )?;
    page += "<div class=\"table\" tabindex=\"0\"><table><tr><th>cache</th><th>bytes per token</th><th>KL, mean</th>\
             <th>KL, 99 %</th><th>same top token</th><th>perplexity</th></tr>\n";
    for cache in &data.caches {
        let line = &cache.line;
        writeln!(
            page,
            "<tr><td>{}</td><td>{}</td><td>{:.2e}</td><td>{:.2e}</td><td>{:.2} %</td><td>{:.3}</td></tr>",
            escape(&line.kv),
            line.bytes_per_token,
            line.kl_mean,
            line.kl_p99,
            100.0 * line.top1_agreement,
            line.perplexity
        )?;
    }
    page += "</table></div>\n";
    page += "<p>Formats of other software (q8_0, q4_0, iq4_nl, mlx4, fp8, nvfp4, KIVI, KVarN; -rot: rotated) are simulated in f64: \
             keys and values of an f32 cache are replaced by the values that the format would return.</p>\n";
    let mut section = |title: &str, about: &str, svg: &str| writeln!(page, "<h2>{title}</h2>\n{about}{svg}");
    section("Divergence against bytes", "", &plots::divergence(data)?)?;
    section("Changed top tokens against bytes", "", &plots::disagreement(data)?)?;
    section("Divergence by position", "", &plots::positions(data)?)?;
    section("Divergence of each layer alone", "", &plots::layers(data)?)?;
    if let Some(pages) = &data.pages {
        let about = "<p>The fraction of the energy (sum of squares) of a page's vectors in their mean: \
                     a codec with page means stores only the rest in its indices. Measured over the full pages of all \
                     windows, with an f32 cache.</p>\n";
        section("Energy in the means of pages", about, &plots::mean_share(pages)?)?;
        let about = format!(
            "<p>The fraction of coordinates beyond the outermost centroids of {} bits: of vectors minus the mean of their \
             page, rotated, and divided by the root mean square of their block. For normally distributed numbers it is \
             {:.3} %.</p>\n",
            pages.bits,
            100.0 * pages.clipped_normal
        );
        section("Clipped coordinates", &about, &plots::clipped(pages)?)?;
    }
    for needles in &data.needles {
        let about = format!(
            "<p>A needle is a passage of 32 tokens that the context does not contain otherwise. A context of {} tokens \
             has one at each depth. At its end, the first 16 tokens of a needle are repeated. The plot shows the mean \
             probability of the remaining 16, and their probability with an f32 cache in a context without needles.</p>\n{}",
            needles.context,
            pass_keys(needles)
        );
        section(&format!("Retrieval from {} tokens", needles.context), &about, &plots::needles(needles)?)?;
    }
    if let Some(answers) = &data.answers {
        page += &answer_table(answers)?;
    }
    page += "</body></html>\n";
    Ok(page)
}

/// The number of pass keys that each cache finds; empty if none was queried.
fn pass_keys(needles: &NeedleData) -> String {
    let found = needles.caches.iter().filter_map(|cache| {
        let keys = cache.pass_keys.as_ref()?;
        Some(format!("{} {} of {}", escape(&cache.kv), keys.all_found(), keys.all()))
    });
    let found: Vec<String> = found.collect();
    if found.is_empty() {
        return String::new();
    }
    let about = "The context also assigns numbers of five digits to eight people. Greedy answers that match them";
    format!("<p>{about}: {}.</p>\n", found.join(", "))
}

fn answer_table(answers: &AnswerData) -> Result<String> {
    let mut table = format!(
        "<h2>Answers, token by token</h2>\n<p>{}, greedy. Other caches follow the answers with an f16 cache. The table has the number of \
         equal answers, the tokens before the first different top token (median), and KL from f16 along its answers.</p>\n<div class=\"table\" tabindex=\"0\"><table><tr><th>cache</th><th>equal \
         answers</th><th>tokens to first difference</th><th>KL, mean</th><th>KL, 99 %</th><th>same top token</th></tr>\n",
        answers.subject
    );
    for line in &answers.caches {
        writeln!(
            table,
            "<tr><td>{}</td><td>{} of {}</td><td>{}</td><td>{:.2e}</td><td>{:.2e}</td><td>{:.2} %</td></tr>",
            escape(&line.kv),
            line.equal(),
            line.first_divergence.len(),
            line.median(),
            line.kl_mean,
            line.kl_p99,
            100.0 * line.top1_agreement
        )?;
    }
    Ok(table + "</table></div>\n")
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
