//! One command of the specification, and the tests that it selects.

use std::collections::BTreeMap;

use crate::targets::Package;

/// A `cargo test` command: a package, the targets of it, and the filters.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Command {
    package: String,
    units: bool,
    examples: bool,
    integration: Vec<String>,
    filters: Vec<String>,
}

impl Command {
    /// Parses a code span. `None`: it is no `cargo test`.
    ///
    /// # Errors
    /// What of it is not understood.
    pub fn parse(span: &str) -> Option<Result<Command, String>> {
        let mut words = span.split_whitespace().skip_while(|word| word.contains('=')).peekable();
        if words.next() != Some("cargo") || words.next() != Some("test") {
            return None;
        }
        // Not a command, but the name of one.
        if matches!(words.peek(), None | Some(&"...")) {
            return None;
        }
        Some(Self::of(words))
    }

    fn of<'a>(mut words: impl Iterator<Item = &'a str>) -> Result<Command, String> {
        let mut command = Command::default();
        while let Some(word) = words.next() {
            match word {
                "-p" => command.package = words.next().unwrap_or_default().to_owned(),
                "--test" => command.integration.push(words.next().unwrap_or_default().to_owned()),
                "--lib" => command.units = true,
                // Its unit tests, which are listed with those of the library.
                "--bin" => command.units = words.next().is_some(),
                "--doc" => command.examples = true,
                "--release" => {}
                "--" => break,
                _ if word.starts_with('-') => return Err(format!("{word} is not known here")),
                _ => command.filters.push(word.to_owned()),
            }
        }
        Ok(command)
    }

    /// Returns the command with other filters.
    pub fn with_filter(&self, filter: &str) -> Command {
        Command { filters: vec![filter.to_owned()], ..self.clone() }
    }

    /// Checks that each target, and each filter, selects a test.
    ///
    /// # Errors
    /// What selects none.
    pub fn resolve(&self, packages: &BTreeMap<String, Package>) -> Result<(), String> {
        let package = packages.get(&self.package).ok_or(format!("no package {:?}", self.package))?;
        if self.examples {
            return if package.examples > 0 { Ok(()) } else { Err("no example".to_owned()) };
        }
        let mut tests: Vec<&String> = Vec::new();
        for name in &self.integration {
            let found = package.integration.get(name).filter(|found| !found.is_empty());
            tests.extend(found.ok_or(format!("no test in --test {name}"))?);
        }
        let is_all = self.integration.is_empty() && !self.units;
        if self.units || is_all {
            tests.extend(&package.units);
        }
        if is_all {
            tests.extend(package.integration.values().flatten());
        }
        let selects = |filter: &str| tests.iter().any(|test| test.contains(filter));
        match self.filters.iter().find(|filter| !selects(filter)) {
            Some(filter) => Err(format!("no test of {} matches {filter}", self.package)),
            None if tests.is_empty() => Err(format!("no test in {}", self.package)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(span: &str) -> Command {
        Command::parse(span).expect("it is a command").expect("it is understood")
    }

    #[test]
    fn commands_are_parsed() {
        let command = parsed("A=1 cargo test --release -p a --test b --test c d -- --nocapture");
        assert_eq!(command.package, "a");
        assert_eq!(command.integration, ["b", "c"]);
        assert_eq!(command.filters, ["d"]);
        assert!(Command::parse("make loom").is_none() && Command::parse("cargo test ...").is_none());
        assert!(Command::parse("cargo test --bogus").is_some_and(|command| command.is_err()));
    }

    #[test]
    fn each_target_and_filter_must_select_a_test() {
        let mut package = Package { units: vec!["a::tests::b".to_owned()], ..Package::default() };
        package.integration.insert("t".to_owned(), vec!["holds".to_owned()]);
        package.integration.insert("empty".to_owned(), Vec::new());
        let packages = BTreeMap::from([("p".to_owned(), package)]);
        let resolves = |span: &str| parsed(span).resolve(&packages).is_ok();
        for good in
            ["-p p", "-p p --lib a::", "-p p --test t hol", "-p p hold", "-p p --lib", "-p p --bin p a::"]
        {
            assert!(resolves(&format!("cargo test {good}")), "{good}");
        }
        for bad in ["-p q", "-p p --lib hold", "-p p --test t b", "-p p --test empty", "-p p --doc"] {
            assert!(!resolves(&format!("cargo test {bad}")), "{bad}");
        }
    }
}
