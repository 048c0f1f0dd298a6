//! The number of GPU cores, from the system's device registry, because Metal does not report it.

use std::{
    ffi::{CStr, c_char, c_void},
    ptr,
};

type CfObject = *const c_void;

#[link(name = "IOKit", kind = "framework")]
unsafe extern "C" {
    fn IORegistryEntryIDMatching(id: u64) -> CfObject;
    fn IOServiceGetMatchingService(port: u32, matching: CfObject) -> u32;
    fn IORegistryEntryCreateCFProperty(entry: u32, key: CfObject, allocator: CfObject, options: u32) -> CfObject;
    fn IOObjectRelease(object: u32) -> i32;
}

#[link(name = "CoreFoundation", kind = "framework")]
unsafe extern "C" {
    fn CFStringCreateWithCString(allocator: CfObject, text: *const c_char, encoding: u32) -> CfObject;
    fn CFGetTypeID(object: CfObject) -> usize;
    fn CFNumberGetTypeID() -> usize;
    fn CFNumberGetValue(number: CfObject, kind: isize, value: *mut c_void) -> u8;
    fn CFRelease(object: CfObject);
}

/// The property's key.
const KEY: &CStr = c"gpu-core-count";
/// `kCFStringEncodingUTF8` and `kCFNumberSInt32Type`.
const UTF8: u32 = 0x0800_0100;
const INT32: isize = 3;

/// The cores of the GPU with this `MTLDevice.registryID`, if the system reports a plausible number.
pub(super) fn of_registry(id: u64) -> Option<usize> {
    // SAFETY: takes a number; the dictionary that it returns is consumed by the next call, null included.
    let entry = unsafe { IOServiceGetMatchingService(0, IORegistryEntryIDMatching(id)) };
    if entry == 0 {
        return None;
    }
    // SAFETY: `entry` is a registry entry, which this function owns; the string ends with a zero byte.
    let property = unsafe {
        let key = CFStringCreateWithCString(ptr::null(), KEY.as_ptr(), UTF8);
        let property =
            if key.is_null() { ptr::null() } else { IORegistryEntryCreateCFProperty(entry, key, ptr::null(), 0) };
        if !key.is_null() {
            CFRelease(key);
        }
        IOObjectRelease(entry);
        property
    };
    if property.is_null() {
        return None;
    }
    let mut cores = 0i32;
    // SAFETY: `property` is an object that this function owns; it is read as a number if it is one, into an i32.
    let read = unsafe {
        let number = CFGetTypeID(property) == CFNumberGetTypeID();
        let read = number && CFNumberGetValue(property, INT32, (&raw mut cores).cast()) != 0;
        CFRelease(property);
        read
    };
    usize::try_from(cores).ok().filter(|cores| read && (1..=1024).contains(cores))
}
