//! Results for the user: tables, and JSON.

use std::fmt::Write;

use crate::{Result, answers::AnswerLine, needles::NeedleLine, prediction::EvalLine, row::Row};

/// Results of one kind: a line for each cache type, or for each cache type and length of a context.
pub enum Lines {
    /// How well each cache type predicts the text.
    Predictions(Vec<EvalLine>),
    /// Answers with each cache type.
    Answers(Vec<AnswerLine>),
    /// Needles and pass keys that are found.
    Needles(Vec<NeedleLine>),
}

impl Lines {
    /// A table with a header.
    pub fn table(&self) -> String {
        match self {
            Lines::Predictions(lines) => table(lines),
            Lines::Answers(lines) => table(lines),
            Lines::Needles(lines) => table(lines),
        }
    }

    /// A JSON object on each line.
    ///
    /// # Errors
    /// A number that JSON does not have.
    pub fn json(&self) -> Result<String> {
        match self {
            Lines::Predictions(lines) => json(lines),
            Lines::Answers(lines) => json(lines),
            Lines::Needles(lines) => json(lines),
        }
    }
}

fn table<R: Row>(lines: &[R]) -> String {
    let mut text = format!("{}\n", R::HEADER);
    lines.iter().for_each(|line| _ = writeln!(text, "{}", line.row()));
    text
}

fn json<R: Row>(lines: &[R]) -> Result<String> {
    let mut text = String::new();
    for line in lines {
        text += &serde_json::to_string(line)?;
        text.push('\n');
    }
    Ok(text)
}
