//! The systems that oxmoe builds on. The build script includes this file, too.

/// The reason why nothing is built for `os`, in cargo's name of the target's system. None if oxmoe builds there.
pub fn refusal(os: &str) -> Option<String> {
    if os == "linux" {
        return None;
    }
    Some(format!(
        "oxmoe builds on Linux alone: expected the target system linux, got {os}. \
         A Linux container or WSL 2 serves on other systems (docs/start.md)."
    ))
}

#[cfg(test)]
mod tests {
    use super::refusal;

    #[test]
    fn linux_alone() {
        assert_eq!(refusal("linux"), None);
        for os in ["macos", "windows", "freebsd", "android", "linux2", ""] {
            let message = refusal(os).expect("no other system has a build");
            assert!(message
                .starts_with(&format!("oxmoe builds on Linux alone: expected the target system linux, got {os}.")));
            // The message has one line: cargo ends a message at the end of a line.
            assert_eq!(message.lines().count(), 1);
        }
    }
}
