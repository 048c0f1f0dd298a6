//! The key-value pairs of a GGUF file.

use std::{collections::BTreeMap, fmt};

use crate::{Error, Result};

/// The type of a metadata value or of an array's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // The format's own names.
pub enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

use ValueType::*;

impl ValueType {
    pub(super) fn from_id(id: u32) -> Option<ValueType> {
        [U8, I8, U16, I16, U32, I32, F32, Bool, String, Array, U64, I64, F64].get(id as usize).copied()
    }

    /// Bytes per value; `None` for strings and arrays.
    pub(super) fn size(self) -> Option<usize> {
        Some(match self {
            U8 | I8 | Bool => 1,
            U16 | I16 => 2,
            U32 | I32 | F32 => 4,
            U64 | I64 | F64 => 8,
            String | Array => return None,
        })
    }
}

/// A metadata value.
#[derive(Clone, Debug, PartialEq)]
pub enum MetadataValue {
    /// A number or boolean.
    Scalar(Scalar),
    /// A text.
    Text(std::string::String),
    /// Numbers or booleans of one type.
    Scalars(Scalars),
    /// Texts.
    Texts(Texts),
    /// Arrays of arrays. Their structure is checked, but their contents are dropped: no known key has any.
    Nested {
        /// The number of inner arrays.
        count: u64,
    },
}

/// A number or boolean, widened without loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scalar {
    /// Any of the integer types.
    Integer(i128),
    /// `f32` or `f64`.
    Float(f64),
    /// `bool`.
    Bool(bool),
}

impl Scalar {
    /// Reads a value from its bytes.
    ///
    /// # Errors
    /// The reason, for a boolean that is neither 0 nor 1.
    pub(super) fn read(kind: ValueType, bytes: &[u8]) -> std::result::Result<Scalar, std::string::String> {
        // The caller passes exactly `kind.size()` bytes.
        macro_rules! number {
            ($type:ty) => {
                <$type>::from_le_bytes(bytes.try_into().expect("the size of the type"))
            };
        }
        Ok(match kind {
            U8 => Scalar::Integer(number!(u8).into()),
            I8 => Scalar::Integer(number!(i8).into()),
            U16 => Scalar::Integer(number!(u16).into()),
            I16 => Scalar::Integer(number!(i16).into()),
            U32 => Scalar::Integer(number!(u32).into()),
            I32 => Scalar::Integer(number!(i32).into()),
            U64 => Scalar::Integer(number!(u64).into()),
            I64 => Scalar::Integer(number!(i64).into()),
            F32 => Scalar::Float(number!(f32).into()),
            F64 => Scalar::Float(number!(f64)),
            Bool => match bytes[0] {
                0 => Scalar::Bool(false),
                1 => Scalar::Bool(true),
                other => return Err(format!("a boolean must be 0 or 1, got {other}")),
            },
            String | Array => unreachable!("not a scalar"),
        })
    }
}

impl fmt::Display for Scalar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scalar::Integer(n) => n.fmt(f),
            Scalar::Float(x) => x.fmt(f),
            Scalar::Bool(b) => b.fmt(f),
        }
    }
}

/// An array of numbers or booleans, stored as in the file.
#[derive(Clone, PartialEq)]
pub struct Scalars {
    kind: ValueType,
    bytes: Vec<u8>,
}

impl Scalars {
    pub(super) fn new(kind: ValueType, bytes: Vec<u8>) -> std::result::Result<Scalars, std::string::String> {
        if kind == Bool {
            bytes.iter().try_for_each(|byte| Scalar::read(Bool, &[*byte]).map(drop))?;
        }
        Ok(Scalars { kind, bytes })
    }

    /// The type of the elements.
    pub fn kind(&self) -> ValueType {
        self.kind
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.size()
    }

    /// Whether the array is empty.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The elements in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Scalar> + '_ {
        let read = |bytes: &[u8]| Scalar::read(self.kind, bytes).expect("checked when the file was read");
        self.bytes.chunks_exact(self.size()).map(read)
    }

    fn size(&self) -> usize {
        self.kind.size().expect("a scalar type")
    }
}

impl fmt::Debug for Scalars {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} × {:?}", self.len(), self.kind)
    }
}

/// An array of texts in one allocation: vocabularies have hundreds of thousands.
#[derive(Clone, Default, PartialEq)]
pub struct Texts {
    joined: std::string::String,
    ends: Vec<u32>,
}

impl Texts {
    /// The caller limits the total length of all texts to 4 GiB.
    pub(super) fn push(&mut self, text: &str) {
        self.joined.push_str(text);
        self.ends.push(u32::try_from(self.joined.len()).expect("limited by the caller"));
    }

    /// The number of texts.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether the array is empty.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The text at an index.
    pub fn get(&self, index: usize) -> Option<&str> {
        let end = *self.ends.get(index)? as usize;
        let start = if index == 0 { 0 } else { self.ends[index - 1] as usize };
        Some(&self.joined[start..end])
    }

    /// The texts in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> + '_ {
        (0..self.len()).map(|index| self.get(index).expect("below the length"))
    }
}

impl fmt::Debug for Texts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} texts", self.len())
    }
}

/// A short form for messages.
impl fmt::Display for MetadataValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MetadataValue::Scalar(value) => value.fmt(f),
            MetadataValue::Text(text) => {
                let shown: std::string::String = text.chars().take(80).collect();
                write!(f, "{shown:?}{}", if shown.len() < text.len() { "…" } else { "" })
            }
            MetadataValue::Scalars(array) => write!(f, "an array of {array:?}"),
            MetadataValue::Texts(array) => write!(f, "an array of {array:?}"),
            MetadataValue::Nested { count } => write!(f, "an array of {count} arrays"),
        }
    }
}

/// The metadata of a GGUF file, with typed access. Every error names the key, the accepted and the actual value.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metadata {
    pairs: BTreeMap<std::string::String, MetadataValue>,
}

impl Metadata {
    /// Inserts a pair. Returns whether the key is new.
    pub(super) fn insert(&mut self, key: std::string::String, value: MetadataValue) -> bool {
        self.pairs.insert(key, value).is_none()
    }

    /// The pairs, sorted by key.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &MetadataValue)> {
        self.pairs.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// A value of any type.
    pub fn get(&self, key: &str) -> Option<&MetadataValue> {
        self.pairs.get(key)
    }

    /// A text; `None` if the key is absent.
    ///
    /// # Errors
    /// `Metadata` for a value of the wrong type.
    pub fn text(&self, key: &str) -> Result<Option<&str>> {
        match self.get(key) {
            None => Ok(None),
            Some(MetadataValue::Text(text)) => Ok(Some(text)),
            Some(other) => Err(error(key, "a string", other)),
        }
    }

    /// An integer of any type, at least 0; `None` if the key is absent.
    ///
    /// # Errors
    /// `Metadata` for a value of the wrong type or a negative number.
    pub fn whole(&self, key: &str) -> Result<Option<u64>> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => whole(value).map(Some).ok_or_else(|| error(key, "an integer, at least 0", value)),
        }
    }

    /// A finite number of any type; `None` if the key is absent.
    ///
    /// # Errors
    /// `Metadata` for a value of the wrong type, infinity or NaN.
    pub fn number(&self, key: &str) -> Result<Option<f64>> {
        match self.get(key) {
            None => Ok(None),
            Some(MetadataValue::Scalar(Scalar::Integer(n))) => Ok(Some(*n as f64)),
            Some(MetadataValue::Scalar(Scalar::Float(x))) if x.is_finite() => Ok(Some(*x)),
            Some(other) => Err(error(key, "a finite number", other)),
        }
    }

    /// A boolean; `None` if the key is absent.
    ///
    /// # Errors
    /// `Metadata` for a value of the wrong type.
    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        match self.get(key) {
            None => Ok(None),
            Some(MetadataValue::Scalar(Scalar::Bool(value))) => Ok(Some(*value)),
            Some(other) => Err(error(key, "true or false", other)),
        }
    }

    /// An array of texts; `None` if the key is absent.
    ///
    /// # Errors
    /// `Metadata` for a value of the wrong type.
    pub fn texts(&self, key: &str) -> Result<Option<&Texts>> {
        match self.get(key) {
            None => Ok(None),
            Some(MetadataValue::Texts(texts)) => Ok(Some(texts)),
            Some(other) => Err(error(key, "an array of strings", other)),
        }
    }

    /// An array of numbers or booleans; `None` if the key is absent.
    ///
    /// # Errors
    /// `Metadata` for a value of the wrong type.
    pub fn scalars(&self, key: &str) -> Result<Option<&Scalars>> {
        match self.get(key) {
            None => Ok(None),
            Some(MetadataValue::Scalars(array)) => Ok(Some(array)),
            Some(other) => Err(error(key, "an array of numbers", other)),
        }
    }
}

fn whole(value: &MetadataValue) -> Option<u64> {
    match value {
        MetadataValue::Scalar(Scalar::Integer(n)) => u64::try_from(*n).ok(),
        _ => None,
    }
}

pub(super) fn error(key: &str, expected: impl fmt::Display, got: impl fmt::Display) -> Error {
    Error::Metadata { key: key.to_string(), expected: expected.to_string(), got: got.to_string() }
}
