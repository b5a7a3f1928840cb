use super::*;

fn described(shape: &[i64], strides: Option<&[i64]>, data: usize, dtype: (u8, u8, u16)) -> Result<View> {
    let (mut shape, mut strides) = (shape.to_vec(), strides.map(<[i64]>::to_vec));
    let tensor = dlpack::Tensor {
        data: data as *mut c_void,
        device: dlpack::DeviceRef { device_type: dlpack::CPU, device_id: 0 },
        ndim: shape.len() as i32,
        dtype: dlpack::DataType { code: dtype.0, bits: dtype.1, lanes: dtype.2 },
        shape: shape.as_mut_ptr(),
        strides: strides.as_mut().map_or(std::ptr::null_mut(), |all| all.as_mut_ptr()),
        byte_offset: 0,
    };
    View::from_dlpack("t", &tensor, Origin::Other, false)
}

const F32: (u8, u8, u16) = (2, 32, 1);

#[test]
fn extents_count_gaps_and_negative_strides() {
    let extent = |shape: &[i64], strides: &[i64]| described(shape, Some(strides), 4096, F32).map(|view| view.extent());
    assert_eq!(extent(&[2, 3], &[3, 1]).ok(), Some((4096, 4096 + 24)));
    assert_eq!(extent(&[2, 3], &[8, 1]).ok(), Some((4096, 4096 + 44)));
    assert_eq!(extent(&[2, 3], &[-3, 1]).ok(), Some((4096 - 12, 4096 + 12)));
    assert_eq!(extent(&[5, 3], &[0, 1]).ok(), Some((4096, 4096 + 12)));
    assert_eq!(extent(&[0, 3], &[3, 1]).ok(), Some((4096, 4096)));
    assert_eq!(extent(&[], &[]).ok(), Some((4096, 4100)));
}

#[test]
fn sizes_that_no_memory_has_are_refused() {
    for shape in [&[-1][..], &[-2, -2], &[1 << 40, 1 << 40], &[0, 1 << 62, 1 << 62], &[1 << 61], &[i64::MIN]] {
        let error = described(shape, None, 4096, F32).expect_err("a shape without memory").to_string();
        assert!(error.starts_with("t: has shape"), "{error}");
    }
    assert!(described(&[2], Some(&[i64::MAX]), 4096, F32).is_err());
    assert!(described(&[2], Some(&[i64::MIN]), 4096, F32).is_err());
    assert!(described(&[1 << 12, 0], None, 0, F32).is_ok());
}

#[test]
fn size_1_dimensions_have_any_stride() {
    let contiguous = |shape: &[i64], strides: &[i64]| described(shape, Some(strides), 4096, F32).unwrap().contiguous();
    assert!(contiguous(&[1, 4], &[999, 1]) && contiguous(&[4, 1], &[1, 77]) && contiguous(&[2, 1, 3], &[3, -5, 1]));
    assert!(!contiguous(&[2, 1, 3], &[4, 3, 1]) && !contiguous(&[4, 2], &[1, 4]));
    assert!(contiguous(&[0, 3], &[7, 7]));
}

#[test]
fn vectors_are_no_elements() {
    assert_eq!(described(&[2], None, 4096, (17, 4, 2)).unwrap().elem, Elem::E2M1_X2);
    for dtype in [(10, 4, 2), (10, 1, 8), (17, 8, 1), (2, 16, 2), (2, 32, 0), (17, 4, 1)] {
        let elem = described(&[2], None, 4096, dtype).unwrap().elem;
        assert_eq!(elem, Elem::Vector(dtype.0, dtype.1, dtype.2));
    }
}

#[test]
fn spans_overlap_where_they_share_a_byte() {
    let span = |start: usize, bytes| Span::new("t", Place::Cpu, start as *const u8, bytes);
    assert!(
        span(10, 5).overlaps(&span(14, 1)) && span(10, 5).overlaps(&span(0, 11)) && span(10, 5).overlaps(&span(11, 1))
    );
    assert!(!span(10, 5).overlaps(&span(15, 9)) && !span(10, 5).overlaps(&span(0, 10)));
    assert!(!span(10, 5).overlaps(&span(12, 0)) && !span(12, 0).overlaps(&span(10, 5)));
    let on_gpu = Span { place: Place::Cuda(0), ..span(10, 5) };
    assert!(!on_gpu.overlaps(&span(10, 5)) && on_gpu.overlaps(&on_gpu));
}
