//! Refusals of groups and collectives, and groups after a failure.

use super::{cpus, groups};
use crate::common::run;
use kvant::{
    CpuOptions, DType, Device, Error, Tensor,
    ops::{self, AllGather, AllReduce, Argmax, Embed, Weight},
};

fn one() -> Device {
    Device::cpu_with(CpuOptions { threads: Some(1), ..CpuOptions::default() }).unwrap()
}

fn assert_value(result: kvant::Result<Device>, text: &str) {
    let error = result.unwrap_err();
    assert!(matches!(error, Error::Value { op: "group", arg: "devices", .. }), "{error}");
    assert!(error.to_string().contains(text), "{error}");
}

#[test]
fn groups_of_other_devices_are_refused() {
    let (a, b, c) = (one(), one(), one());
    assert_value(Device::group(&[]), "1 to 64 devices, got 0");
    assert_value(Device::group(&[a.clone(), a.clone()]), "twice");
    assert_value(Device::group(&[a.clone(), Device::reference()]), "of one kind, cpu");
    let group = Device::group(&[a.clone(), b.clone()]).unwrap();
    assert_value(Device::group(std::slice::from_ref(&group)), "no groups");
    assert_value(Device::group(&[c.clone(), b.clone()]), "of no other group");
    assert_value(Device::group(&[b.clone(), a.clone()]), "of no other group");
    assert_eq!(Device::group(&[a.clone(), b.clone()]).unwrap(), group);
    assert!(group != a && group.kind() == a.kind());
    drop(group);
    // They are free now.
    assert_eq!(Device::group(&[c, b]).unwrap().ranks(), 2);
}

#[test]
fn ranks_have_numbers() {
    let (plain, group) = (one(), cpus(3, 1));
    assert_eq!((plain.ranks(), group.ranks()), (1, 3));
    assert_eq!(plain.rank(0).unwrap(), plain);
    assert!(matches!(plain.rank(1), Err(Error::Value { .. })) && matches!(group.rank(3), Err(Error::Value { .. })));
    let x = Tensor::from_slice(&group, &[1u32, 2, 3], &[3]).unwrap();
    for rank in 0..3 {
        let of_rank = x.rows(1..3).unwrap().on_rank(rank).unwrap();
        assert_eq!(of_rank.device(), &group.rank(rank).unwrap());
        of_rank.write(&[rank as u32, 7]).unwrap();
    }
    assert!(matches!(x.on_rank(3), Err(Error::Value { .. })));
    assert_eq!(x.to_vec::<u32>().unwrap(), [1, 0, 7]);
    assert_eq!(x.on_rank(2).unwrap().to_vec::<u32>().unwrap(), [1, 2, 7]);
    assert_eq!(x.read_back().unwrap().to_vec::<u32>().unwrap(), [1, 0, 7]);
    let alone = Tensor::from_slice(&plain, &[5u8], &[1]).unwrap();
    assert_eq!(alone.on_rank(0).unwrap().to_vec::<u8>().unwrap(), [5]);
    assert!(matches!(alone.on_rank(1), Err(Error::Value { .. })));
    // One rank is short of bytes.
    let short = Tensor::from_rank_bytes(&group, DType::U8, &[2], |rank| Ok::<_, Error>(vec![0; 2 - rank / 2]));
    assert!(matches!(short, Err(Error::Value { .. })));
}

#[test]
fn collectives_refuse_other_shapes() {
    for group in groups().into_iter().chain([one()]) {
        let ranks = group.ranks();
        let zeros = |dtype, shape: &[usize]| Tensor::zeros(&group, dtype, shape).unwrap();
        let x = zeros(DType::F32, &[2, 3]);
        let reduce = |x: &Tensor, out: &Tensor| run(&group, |enc| ops::all_reduce(enc, &AllReduce::new(x, out)));
        let gather = |x: &Tensor, out: &Tensor| run(&group, |enc| ops::all_gather(enc, &AllGather::new(x, out)));
        assert!(matches!(reduce(&x, &zeros(DType::F32, &[5])), Err(Error::Value { arg: "out", .. })));
        assert!(matches!(reduce(&zeros(DType::U32, &[6]), &x), Err(Error::DType { arg: "x", .. })));
        assert!(matches!(reduce(&x, &zeros(DType::U8, &[6])), Err(Error::DType { arg: "out", .. })));
        let shifted = zeros(DType::F32, &[4, 3]);
        let (first, second) = (shifted.rows(0..2).unwrap(), shifted.rows(1..3).unwrap());
        assert!(matches!(reduce(&first, &second), Err(Error::Overlap { .. })));
        assert!(matches!(gather(&x, &zeros(DType::F16, &[2, 3 * ranks])), Err(Error::DType { arg: "out", .. })));
        assert!(matches!(gather(&x, &zeros(DType::F32, &[2, 3 * ranks + 1])), Err(Error::Shape { arg: "out", .. })));
        assert!(matches!(gather(&zeros(DType::F32, &[6]), &x), Err(Error::Shape { arg: "x", .. })));
        // A rank's tensors are not the group's.
        if ranks > 1 {
            assert!(matches!(reduce(&x.on_rank(0).unwrap(), &x), Err(Error::WrongDevice { arg: "x", .. })));
            assert!(matches!(gather(&x, &x), Err(Error::Shape { .. })));
        } else {
            assert!(matches!(gather(&x, &x), Err(Error::Overlap { .. })));
        }
    }
}

/// An index that is out of range on one rank only: the others wait for it in a sum, and leave.
#[test]
fn a_rank_with_a_wrong_index_fails_all() {
    for ranks in [2, 3, 4] {
        let group = cpus(ranks, 1);
        let table = Tensor::from_slice(&group, &[1f32, 2., 3.], &[3, 1]).unwrap();
        let (ids, x) =
            (Tensor::zeros(&group, DType::U32, &[1]).unwrap(), Tensor::zeros(&group, DType::F32, &[1, 1]).unwrap());
        let sum = Tensor::zeros(&group, DType::F32, &[1, 1]).unwrap();
        let pass = || {
            run(&group, |enc| {
                ops::embed(enc, &Embed::new(Weight::Dense(&table), &ids, &x))?;
                ops::all_reduce(enc, &AllReduce::new(&x, &sum))
            })
        };
        for wrong in 0..ranks {
            ids.on_rank(wrong).unwrap().write(&[9u32]).unwrap();
            let error = pass().unwrap_err();
            assert!(matches!(error, Error::OutOfRange { op: "embed", got: 9, limit: 3, .. }), "{error}");
            ids.write(&[2u32]).unwrap();
            pass().unwrap();
            assert_eq!(sum.on_rank(wrong).unwrap().to_vec::<f32>().unwrap(), [3.0 * ranks as f32]);
        }
    }
}

/// Ranks agree on what they compute of the same numbers, and the result is read from one.
#[test]
fn ranks_choose_the_same_token() {
    for group in groups() {
        let logits: Vec<f32> = crate::common::Rng::of("logits").normals(5000);
        let x = Tensor::from_slice(&group, &logits, &[1, 5000]).unwrap();
        let out = Tensor::zeros(&group, DType::U32, &[1]).unwrap();
        run(&group, |enc| ops::argmax(enc, &Argmax::new(&x, &out))).unwrap();
        let best = (0..5000).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap() as u32;
        for rank in 0..group.ranks() {
            assert_eq!(out.on_rank(rank).unwrap().to_vec::<u32>().unwrap(), [best]);
        }
        assert_eq!(out.read_back().unwrap().to_vec::<u32>().unwrap(), [best]);
    }
}
