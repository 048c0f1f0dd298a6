//! Invalid calls return an error and write nothing.

use super::*;
use crate::common::with;

/// Checks that `attempt` returns an error that `expected` accepts, and writes nothing.
fn refused<T>(
    what: &str,
    device: &Device,
    watched: &[&Tensor],
    attempt: impl FnOnce(&mut Encoder) -> Result<T>,
    expected: fn(&Error) -> bool,
) {
    let before: Vec<Vec<u8>> = watched.iter().map(|t| bytes_of(t).unwrap()).collect();
    match run(device, attempt) {
        Ok(()) => panic!("{device}: {what} is accepted"),
        Err(e) => assert!(expected(&e), "{device}: {what}: the wrong error: {e:?}"),
    }
    let after: Vec<Vec<u8>> = watched.iter().map(|t| bytes_of(t).unwrap()).collect();
    assert!(before == after, "{device}: {what}: something was written");
}

/// Valid arguments for a write, an attention call and a norm, to be invalidated one at a time.
struct Valid {
    layer: KvLayer,
    step: Step,
    q: Tensor,
    kv: Tensor,
    weight: Tensor,
    out: Tensor,
}

impl Valid {
    fn new(device: &Device) -> Valid {
        let mut rng = Rng::of("valid");
        let layer = KvLayer::new(device, linear_spec(2, 4, 64, Codec::F32)).unwrap();
        fill(&layer, 0x3C).unwrap();
        let up = |rng: &mut Rng, shape: &[usize]| {
            Tensor::from_slice(device, &rng.normals(shape.iter().product()), shape).unwrap()
        };
        Valid {
            layer,
            step: Step::new(device, 1, &[(0, 0), (0, 1), (0, 2)]).unwrap(),
            q: up(&mut rng, &[3, 4, 64]),
            kv: up(&mut rng, &[3, 2, 64]),
            weight: up(&mut rng, &[64]),
            out: up(&mut rng, &[3, 4, 64]),
        }
    }

    fn attend<'a>(&'a self) -> Attend<'a> {
        plain(&self.layer, &self.q, &self.step, None, &self.out)
    }

    fn write<'a>(&'a self) -> KvWrite<'a> {
        let order = HeadOrder::TokenMajor;
        KvWrite::new(&self.kv, &self.kv, &self.step, &self.layer).order(order)
    }

    fn norm<'a>(&'a self) -> NormRope<'a> {
        NormRope::new(&self.q, self.step.positions(), &self.out)
            .norm(Some(HeadNorm::new(1e-6).weight(Some(&self.weight))))
    }

    fn watched(&self) -> Vec<&Tensor> {
        let planes = self.layer.k().tensors().chain(self.layer.v().tensors());
        planes.map(|(_, t)| t).chain([&self.out]).collect()
    }
}

#[test]
fn undersized_tensor() {
    let shape = |e: &Error| matches!(e, Error::Shape { .. } | Error::Value { .. });
    for device in devices() {
        let v = Valid::new(device);
        let w = v.watched();
        let two = |t: &Tensor| t.rows(0..2).unwrap();
        let (q, kv, weight, out) = (two(&v.q), two(&v.kv), v.weight.rows(0..63).unwrap(), two(&v.out));
        let [positions, sequence, lens] = [v.step.positions(), v.step.sequence(), v.step.lens()].map(Tensor::clone);
        let step_of = |positions: &Tensor, sequence: &Tensor, lens: &Tensor| {
            Step::from_tensors(positions.clone(), sequence.clone(), lens.clone())
        };
        let short = step_of(&two(&positions), &sequence, &lens);
        let lens = step_of(&positions, &sequence, &lens.rows(0..0).unwrap());
        let sequence = step_of(&positions, &two(&sequence), v.step.lens());
        refused(
            "attend: q too short",
            device,
            &w,
            |e| ops::attend(e, &with(v.attend(), |args| args.q = (&q).into())),
            shape,
        );
        refused(
            "attend: out too short",
            device,
            &w,
            |e| ops::attend(e, &with(v.attend(), |args| args.out = &out)),
            shape,
        );
        for step in [&short, &sequence, &lens] {
            refused(
                "attend: step too short",
                device,
                &w,
                |e| ops::attend(e, &with(v.attend(), |args| args.step = step)),
                shape,
            );
        }
        refused(
            "kv_write: k too short",
            device,
            &w,
            |e| ops::kv_write(e, &with(v.write(), |args| args.k = &kv)),
            shape,
        );
        refused(
            "kv_write: v too short",
            device,
            &w,
            |e| ops::kv_write(e, &with(v.write(), |args| args.v = &kv)),
            shape,
        );
        let both = with(v.write(), |args| (args.k, args.v) = (&kv, &kv));
        refused("kv_write: both too short", device, &w, |e| ops::kv_write(e, &both), shape);
        let late = v.write().first_token(1);
        refused("kv_write: range too long", device, &w, |e| ops::kv_write(e, &late), shape);
        let overflow = v.write().first_token(usize::MAX);
        refused("kv_write: range overflows", device, &w, |e| ops::kv_write(e, &overflow), shape);
        let norm = v.norm().norm(Some(HeadNorm::new(1e-6).weight(Some(&weight))));
        refused("norm_rope: weight too short", device, &w, |e| ops::norm_rope(e, &norm), shape);
        refused(
            "norm_rope: out too short",
            device,
            &w,
            |e| ops::norm_rope(e, &with(v.norm(), |args| args.out = &out)),
            shape,
        );
        refused(
            "norm_rope: positions",
            device,
            &w,
            |e| ops::norm_rope(e, &with(v.norm(), |args| args.positions = short.positions())),
            shape,
        );
        let k = Tensor::zeros(device, DType::F32, &[1, 2, 3, 64]).unwrap();
        let made = KvLayer::from_dense(linear_spec(2, 4, 64, Codec::F32), &k, &k);
        assert!(matches!(made, Err(Error::Shape { .. })), "{device}: a layer over too small a tensor");
        // Without the change, the arguments are valid.
        run(device, |e| ops::kv_write(e, &v.write())).unwrap();
        run(device, |e| ops::attend(e, &v.attend())).unwrap();
        run(device, |e| ops::norm_rope(e, &v.norm())).unwrap();
    }
}

#[test]
fn wrong_dtype() {
    let dtype = |e: &Error| matches!(e, Error::DType { .. });
    for device in devices() {
        let v = Valid::new(device);
        let w = v.watched();
        let ints = |t: &Tensor| Tensor::zeros(device, DType::U32, t.shape()).unwrap();
        let floats = |t: &Tensor| Tensor::zeros(device, DType::F32, t.shape()).unwrap();
        let (q, kv, out) = (ints(&v.q), ints(&v.kv), ints(&v.out));
        refused("attend: q", device, &w, |e| ops::attend(e, &with(v.attend(), |args| args.q = (&q).into())), dtype);
        refused("attend: out", device, &w, |e| ops::attend(e, &with(v.attend(), |args| args.out = &out)), dtype);
        let [positions, sequence, lens] = [v.step.positions(), v.step.sequence(), v.step.lens()].map(Tensor::clone);
        for step in [
            Step::from_tensors(floats(&positions), sequence.clone(), lens.clone()),
            Step::from_tensors(positions.clone(), floats(&sequence), lens.clone()),
            Step::from_tensors(positions, sequence, floats(&lens)),
        ] {
            refused("attend: step", device, &w, |e| ops::attend(e, &with(v.attend(), |args| args.step = &step)), dtype);
            refused(
                "kv_write: step",
                device,
                &w,
                |e| ops::kv_write(e, &with(v.write(), |args| args.step = &step)),
                dtype,
            );
        }
        refused("kv_write: k", device, &w, |e| ops::kv_write(e, &with(v.write(), |args| args.k = &kv)), dtype);
        refused("norm_rope: x", device, &w, |e| ops::norm_rope(e, &with(v.norm(), |args| args.x = &q)), dtype);
        refused("norm_rope: out", device, &w, |e| ops::norm_rope(e, &with(v.norm(), |args| args.out = &out)), dtype);
        let made = KvLayer::from_dense(linear_spec(2, 4, 64, Codec::F16), v.layer.k().tensors().next().unwrap().1, &kv);
        assert!(matches!(made, Err(Error::DType { .. })), "{device}: a layer over another dtype");
        assert!(v.q.to_vec::<u32>().is_err() && v.step.lens().to_f32().is_err(), "{device}: downloads are typed");
    }
}

/// Indices beyond the layer or the length: an error if the host sees the numbers, otherwise a skipped token; never a
/// write.
#[test]
fn position_out_of_range() {
    for device in devices() {
        let v = Valid::new(device);
        let bad = [
            ("a position at the capacity", vec![4, 1, 2], vec![0, 0, 0], vec![5]),
            ("a position far out", vec![0, u32::MAX, 2], vec![0, 0, 0], vec![3]),
            ("a length beyond the capacity", vec![0, 1, 2], vec![0, 0, 0], vec![5]),
            ("a position at the length", vec![0, 1, 3], vec![0, 0, 0], vec![3]),
            ("a sequence that is not there", vec![0, 1, 2], vec![0, 1, 0], vec![3]),
            ("a sequence far out", vec![0, 1, 2], vec![0, u32::MAX - 1, 0], vec![3]),
        ];
        for (what, positions, sequence, lens) in bad {
            let u32s = |x: &[u32]| Tensor::from_slice(device, x, &[x.len()]).unwrap();
            let step = Step::from_tensors(u32s(&positions), u32s(&sequence), u32s(&lens));
            let range = |e: &Error| matches!(e, Error::OutOfRange { .. });
            let (write, attend) =
                (with(v.write(), |args| args.step = &step), with(v.attend(), |args| args.step = &step));
            if sees_indices(device) {
                let w = v.watched();
                refused(&format!("kv_write: {what}"), device, &w, |e| ops::kv_write(e, &write), range);
                refused(&format!("attend: {what}"), device, &w, |e| ops::attend(e, &attend), range);
                continue;
            }
            // The valid tokens are written; no other slot changes, and nothing faults.
            let before = planes(&v.layer).unwrap();
            for result in [run(device, |e| ops::kv_write(e, &write)), run(device, |e| ops::attend(e, &attend))] {
                result.unwrap_or_else(|e| panic!("{device}: {what}: {e}"));
            }
            let row = 64 * 4;
            for (before, after) in before.iter().zip(planes(&v.layer).unwrap()) {
                for (slot, (x, y)) in before.chunks(row).zip(after.chunks(row)).enumerate() {
                    let written =
                        positions.iter().zip(&sequence).any(|(&p, &s)| s == 0 && p < lens[0] && p as usize == slot % 4);
                    assert!(written || x == y, "{device}: {what}: slot {slot} changed");
                }
            }
        }
        // Positions beyond the rotary tables.
        let tables = Tensor::zeros(device, DType::F32, &[2, 32]).unwrap();
        let rope = Rope::new(Angles::Tables { cos: &tables, sin: &tables }, 32);
        let args = v.norm().rope(Some(rope));
        if sees_indices(device) {
            let range = |e: &Error| matches!(e, Error::OutOfRange { .. });
            refused("norm_rope: beyond the tables", device, &v.watched(), |e| ops::norm_rope(e, &args), range);
        } else {
            run(device, |e| ops::norm_rope(e, &args)).unwrap();
        }
    }
}

/// A device without memory returns an error with the requested size, and keeps its existing data. Only on CUDA, which
/// has its own memory; elsewhere a test must not exhaust the host's.
#[test]
fn out_of_memory() {
    for device in devices().iter().filter(|device| device.kind() == DeviceKind::Cuda) {
        let kept = Tensor::from_slice(device, &[1u32, 2, 3], &[3]).unwrap();
        let mut all = Vec::new();
        // The last allocation exceeds every device's memory.
        for bytes in std::iter::repeat_n(32usize << 30, 16).chain([1 << 50]) {
            match Tensor::zeros(device, DType::U8, &[bytes]) {
                Ok(tensor) => all.push(tensor),
                Err(Error::OutOfMemory { bytes: asked, .. }) => assert_eq!(asked, bytes, "{device}"),
                Err(other) => panic!("{device}: {other}"),
            }
        }
        assert!(all.len() < 16, "{device}: more memory than this test knows of");
        assert_eq!(kept.to_vec::<u32>().unwrap(), [1, 2, 3], "{device}");
        drop(all);
        let again = Tensor::zeros(device, DType::U8, &[1 << 30]).unwrap();
        assert_eq!(again.rows(0..1).unwrap().to_vec::<u8>().unwrap(), [0], "{device}");
    }
}
