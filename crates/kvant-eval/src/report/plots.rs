//! The plots of a report, as SVG.

use plotters::{
    coord::{Shift, combinators::LogCoord, combinators::WithKeyPoints},
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use super::data::{CacheData, NeedleData, PageData, ReportData, SideNumbers};
use crate::{Result, formats::Format};

/// Small, so that text is legible at the 330 pixels of the page.
const SIZE: (u32, u32) = (440, 380);
/// The palette of Okabe and Ito, which is distinguishable with most colour-vision deficiencies.
const COLOURS: [RGBColor; 8] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
    RGBColor(90, 90, 90),
    RGBColor(150, 120, 0),
];
const FONT: (&str, u32) = ("sans-serif", 13);

fn colour(index: usize) -> RGBColor {
    COLOURS[index % COLOURS.len()]
}

const DENSE: &str = "dense";
const PEERS: &str = "other software (f64)";

/// The family of a cache type, whose points are joined by a line.
fn family(kv: &str) -> &'static str {
    match kv {
        kv if kv.starts_with('@') => "types per layer",
        kv if kv.contains(':') => "keys and values differ",
        kv if kv.starts_with("tq") && kv.ends_with('c') => "TurboQuant with sealed pages",
        kv if kv.starts_with("tq") && kv.ends_with("-open") => "open pages of 16 bits",
        kv if kv.starts_with("tq") => "TurboQuant",
        kv if kv.parse::<Format>().is_ok() => PEERS,
        _ => DENSE,
    }
}

/// The last component of a path; other names unchanged.
fn short(kv: &str) -> &str {
    kv.rsplit('/').next().unwrap_or(kv)
}

/// Mean divergence against bytes per token.
pub fn divergence(data: &ReportData) -> Result<String> {
    against_bytes(data, "mean KL, nats (log)", |cache| cache.line.kl_mean)
}

/// The fraction of predictions with another most probable token, against bytes per token.
pub fn disagreement(data: &ReportData) -> Result<String> {
    against_bytes(data, "other most probable token, % (log)", |cache| 100.0 * (1.0 - cache.line.top1_agreement))
}

/// Cache types by bytes per token. Zeros have no logarithm and are omitted.
fn against_bytes(data: &ReportData, label: &str, value: impl Fn(&CacheData) -> f64) -> Result<String> {
    let points: Vec<(&str, f64, f64)> = data
        .caches
        .iter()
        .map(|cache| (cache.line.kv.as_str(), cache.line.bytes_per_token as f64, value(cache)))
        .filter(|point| point.2 > 0.0)
        .collect();
    let max = points.iter().map(|point| point.1).fold(1.0, f64::max);
    let mut families: Vec<&str> = Vec::new();
    for (kv, ..) in &points {
        if !families.contains(&family(kv)) {
            families.push(family(kv));
        }
    }
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        let names: Vec<_> = families.iter().enumerate().map(|(index, &name)| (name, colour(index))).collect();
        let mut chart = ChartBuilder::on(&legend(&root, &names)?)
            .margin(12)
            .x_label_area_size(44)
            .y_label_area_size(64)
            .build_cartesian_2d(0.0..max * 1.12, log_axis(points.iter().map(|point| point.2)))?;
        let mut mesh = chart.configure_mesh();
        mesh.x_desc("bytes per token, keys and values of all layers").y_desc(label);
        mesh.x_labels(6)
            .x_label_formatter(&|x| format!("{x:.0}"))
            .y_label_formatter(&scientific)
            .label_style(FONT)
            .light_line_style(TRANSPARENT)
            .draw()?;
        for (index, &name) in families.iter().enumerate() {
            let colour = colour(index);
            let mut of_family: Vec<_> = points.iter().filter(|point| family(point.0) == name).collect();
            of_family.sort_by(|a, b| a.1.total_cmp(&b.1));
            let joined = if of_family.len() > 1 && name.starts_with("Turbo") { &of_family[..] } else { &[] };
            chart.draw_series(LineSeries::new(joined.iter().map(|point| (point.1, point.2)), &colour))?;
            chart.draw_series(of_family.iter().map(|point| Circle::new((point.1, point.2), 4, colour.filled())))?;
            // On the side of the line that is farther from other lines.
            let (h_pos, offset) =
                if name.starts_with("Turbo") || name == DENSE { (HPos::Left, 7) } else { (HPos::Right, -7) };
            chart.draw_series(of_family.iter().map(|point| {
                let style = TextStyle::from(FONT.into_font()).pos(Pos::new(h_pos, VPos::Bottom));
                EmptyElement::at((point.1, point.2)) + Text::new(short(point.0).to_string(), (offset, 0), style)
            }))?;
        }
        root.present()?;
    }
    Ok(svg)
}

/// Mean divergence by the position in a window.
pub fn positions(data: &ReportData) -> Result<String> {
    let numbers = data.caches.iter().flat_map(|cache| &cache.kl_by_position).copied().filter(|&kl| kl > 0.0);
    let window = data.window_tokens as f64;
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        let mut chart = ChartBuilder::on(&root)
            .margin(12)
            .x_label_area_size(44)
            .y_label_area_size(64)
            .build_cartesian_2d(0.0..window * 1.25, log_axis(numbers))?;
        let mut mesh = chart.configure_mesh();
        mesh.x_desc("position in the window").y_desc("mean KL, nats (log)");
        let position = |x: &f64| if *x <= window { format!("{x:.0}") } else { String::new() };
        mesh.x_label_formatter(&position).y_label_formatter(&scientific);
        mesh.label_style(FONT).light_line_style(TRANSPARENT).draw()?;
        let series = data.caches.iter().map(|cache| {
            let parts = cache.kl_by_position.len() as f64;
            let points = cache.kl_by_position.iter().enumerate();
            let points = points.map(|(part, &kl)| ((part as f64 + 0.5) * window / parts, kl));
            (short(&cache.line.kv), points.filter(|point| point.1 > 0.0).collect())
        });
        lines(&mut chart, &root, series)?;
        root.present()?;
    }
    Ok(svg)
}

/// The cost of each layer.
pub fn layers(data: &ReportData) -> Result<String> {
    let layers = &data.layers;
    bars(&layers.kl, &format!("mean KL, nats, of {} there alone", layers.kv), None)
}

/// The energy in the means of pages.
pub fn mean_share(pages: &PageData) -> Result<String> {
    bars(&pages.mean_share, "share of the energy in the mean of a page", None)
}

/// The coordinates that a codebook clips, with a line for normally distributed numbers.
pub fn clipped(pages: &PageData) -> Result<String> {
    bars(&pages.clipped, "share of coordinates beyond the outermost centroids", Some(pages.clipped_normal))
}

/// A bar for the keys and one for the values of each layer, and a line at `level`.
fn bars(sides: &SideNumbers, label: &str, level: Option<f64>) -> Result<String> {
    let max = sides.keys.iter().chain(&sides.values).copied().chain(level).fold(1e-12, f64::max);
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        let count = sides.keys.len();
        let right = count as f64 - 0.5;
        let mut names = vec![("keys", colour(0)), ("values", colour(1))];
        names.extend(level.map(|_| ("normal numbers", BLACK)));
        let mut chart = ChartBuilder::on(&legend(&root, &names)?)
            .margin(12)
            .x_label_area_size(44)
            .y_label_area_size(64)
            .build_cartesian_2d(-0.5..right, 0.0..max * 1.15)?;
        let mut mesh = chart.configure_mesh();
        mesh.disable_x_mesh().x_desc("layer").y_desc(label);
        mesh.x_labels(count.min(12))
            .x_label_formatter(&|x| if x.fract() == 0.0 { format!("{x:.0}") } else { String::new() });
        mesh.y_label_formatter(&scientific).label_style(FONT).light_line_style(TRANSPARENT).draw()?;
        for (index, (numbers, left)) in [(&sides.keys, -0.36), (&sides.values, 0.02)].into_iter().enumerate() {
            let colour = colour(index);
            let bars = numbers.iter().enumerate().map(|(layer, &number)| {
                let left = layer as f64 + left;
                Rectangle::new([(left, 0.0), (left + 0.34, number)], colour.filled())
            });
            chart.draw_series(bars)?;
        }
        if let Some(level) = level {
            chart.draw_series(LineSeries::new([(-0.5, level), (right, level)], &BLACK))?;
        }
        root.present()?;
    }
    Ok(svg)
}

/// The probability of needles by their depth.
pub fn needles(data: &NeedleData) -> Result<String> {
    let of_caches = data.caches.iter().map(|cache| (short(&cache.kv), &cache.probabilities));
    let all: Vec<_> = of_caches.chain([("no needle", &data.without)]).collect();
    let max = all.iter().flat_map(|series| series.1).copied().fold(1e-6, f64::max);
    let series = all.iter().map(|&(name, numbers)| {
        let points = data.depths.iter().copied().zip(numbers.iter().copied()).collect();
        (name, points)
    });
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        let mut chart = ChartBuilder::on(&root)
            .margin(12)
            .x_label_area_size(44)
            .y_label_area_size(64)
            .build_cartesian_2d(0.0..1.25, 0.0..max * 1.1)?;
        let mut mesh = chart.configure_mesh();
        mesh.x_desc("share of the context before the needle").y_desc("mean probability of its tokens");
        let depth = |x: &f64| if *x <= 1.0 { format!("{x:.1}") } else { String::new() };
        mesh.x_label_formatter(&depth).y_label_formatter(&scientific);
        mesh.label_style(FONT).light_line_style(TRANSPARENT).draw()?;
        lines(&mut chart, &root, series)?;
        root.present()?;
    }
    Ok(svg)
}

/// Draws lines with their names at their ends, one below the other.
fn lines<'a, 'b, X, Y>(
    chart: &mut ChartContext<'a, SVGBackend<'a>, Cartesian2d<X, Y>>,
    root: &DrawingArea<SVGBackend<'a>, Shift>,
    series: impl Iterator<Item = (&'b str, Vec<(f64, f64)>)>,
) -> Result
where
    X: Ranged<ValueType = f64>,
    Y: Ranged<ValueType = f64>,
{
    let mut labels = Vec::new();
    for (index, (name, points)) in series.enumerate() {
        let colour = colour(index);
        if let Some(end) = points.last() {
            labels.push((chart.backend_coord(end), name, colour));
        }
        chart.draw_series(LineSeries::new(points, colour.stroke_width(2)))?;
    }
    labels.sort_by_key(|label| label.0.1);
    let mut next = 0;
    for ((x, y), name, colour) in labels {
        let y = y.max(next);
        next = y + FONT.1 as i32;
        let style = TextStyle::from(FONT.into_font()).color(&colour).pos(Pos::new(HPos::Left, VPos::Center));
        root.draw_text(name, &style, (x + 6, y))?;
    }
    Ok(())
}

/// A logarithmic axis from below the minimum to above the maximum.
fn log_axis(numbers: impl Iterator<Item = f64>) -> WithKeyPoints<LogCoord<f64>> {
    let (min, max) = numbers.fold((f64::INFINITY, 0.0), |(min, max), x| (f64::min(min, x), f64::max(max, x)));
    let bounds = if min > max { 1e-3..1.0 } else { min / 2.0..max * 2.0 };
    let ticks = ticks(&bounds);
    bounds.log_scale().with_key_points(ticks)
}

/// Powers of ten within bounds; if there are few, also 2 and 5 times these.
fn ticks(bounds: &std::ops::Range<f64>) -> Vec<f64> {
    let of = |factors: &[f64]| -> Vec<f64> {
        let exponents = bounds.start.log10().floor() as i32..=bounds.end.log10().ceil() as i32;
        let all = exponents.flat_map(|exponent| factors.iter().map(move |factor| factor * 10f64.powi(exponent)));
        all.filter(|tick| bounds.contains(tick)).collect()
    };
    let tens = of(&[1.0]);
    if tens.len() > 2 { tens } else { of(&[1.0, 2.0, 5.0]) }
}

/// As `0.01` or `2.5e-3`.
fn scientific(number: &f64) -> String {
    if (0.01..1000.0).contains(number) || *number == 0.0 {
        return format!("{}", (number * 1e4).round() / 1e4);
    }
    format!("{number:.1e}").replace(".0e", "e")
}

/// Draws names with their colours above a plot. Returns the area of the plot.
fn legend<'a>(
    root: &DrawingArea<SVGBackend<'a>, Shift>,
    names: &[(&str, RGBColor)],
) -> Result<DrawingArea<SVGBackend<'a>, Shift>> {
    const LEFT: i32 = 14;
    let (mut x, mut y) = (LEFT, 14);
    for (name, colour) in names {
        // The page's font is unknown here: a letter is about half as wide as it is high.
        let width = 34 + name.chars().count() as i32 * FONT.1 as i32 * 11 / 20;
        if x > LEFT && x + width > SIZE.0 as i32 {
            (x, y) = (LEFT, y + 20);
        }
        root.draw(&Rectangle::new([(x, y - 5), (x + 10, y + 5)], colour.filled()))?;
        let style = TextStyle::from(FONT.into_font()).pos(Pos::new(HPos::Left, VPos::Center));
        root.draw_text(name, &style, (x + 16, y))?;
        x += width;
    }
    Ok(root.split_vertically(y + 8).1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_tick_is_there_once() {
        assert_eq!(ticks(&(0.5..40.0)).iter().map(scientific).collect::<Vec<_>>(), ["0.5", "1", "2", "5", "10", "20"]);
        assert_eq!(ticks(&(2e-4..30.0)).iter().map(scientific).collect::<Vec<_>>(), ["1e-3", "0.01", "0.1", "1", "10"]);
        for (min, max) in [(1e-300, 1e300), (3.0, 3.5), (1e-3, 1.0)] {
            let ticks = ticks(&(min..max));
            assert!(ticks.windows(2).all(|two| two[0] < two[1]) && ticks.iter().all(|tick| (min..max).contains(tick)));
        }
    }
}
