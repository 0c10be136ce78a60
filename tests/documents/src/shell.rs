//! The commands in a document's code blocks, taken apart as a shell does: into words, without
//! comments, redirections and variables.

/// One simple command: the line that it begins in, from 1, and its words.
#[derive(Clone, Debug, PartialEq)]
pub struct Simple {
    /// The number of its line.
    pub line: usize,
    /// The program and its arguments. A `sudo` before it is left out.
    pub words: Vec<String>,
}

/// Returns the commands of all code blocks that are for a shell.
///
/// A block marked `console` has them after `$ `. A block that is only indented has them in lines
/// with at most seven spaces; such a block may be a drawing or a file too, so a caller picks the
/// programs that it knows.
pub fn commands(text: &str) -> Vec<Simple> {
    let mut found = Vec::new();
    let mut fence: Option<&str> = None;
    let mut lines = text.lines().enumerate();
    while let Some((at, line)) = lines.next() {
        if let Some(language) = line.trim_start().strip_prefix("```") {
            fence = if fence.is_some() { None } else { Some(language) };
            continue;
        }
        let Some(first) = command_line(line, fence) else { continue };
        let mut whole = first.to_owned();
        while whole.ends_with('\\') {
            whole.pop();
            let Some((_, more)) = lines.next() else { break };
            whole.push_str(more.trim());
        }
        // A line of a file, such as `name = value`.
        let is_setting = |words: &[String]| words.get(1).is_some_and(|word| word == "=");
        let commands = simple(&whole).into_iter().filter(|words| !is_setting(words));
        found.extend(commands.map(|words| Simple { line: at + 1, words }));
    }
    found
}

/// Returns what a line of a document gives a shell.
fn command_line<'a>(line: &'a str, fence: Option<&str>) -> Option<&'a str> {
    match fence {
        Some("console") => line.trim_start().strip_prefix("$ "),
        Some("sh") => Some(line),
        Some(_) => None,
        None => {
            let code = line.trim_start_matches(' ');
            let is_block = (4..8).contains(&(line.len() - code.len()));
            (is_block && !code.is_empty()).then_some(code)
        }
    }
}

/// Splits a line into simple commands, each into its words.
pub fn simple(line: &str) -> Vec<Vec<String>> {
    let mut commands = vec![Vec::new()];
    let mut word: Option<String> = None;
    let mut skips_word = false;
    let mut chars = line.chars().peekable();
    let end_word = |word: &mut Option<String>, skips: &mut bool, commands: &mut Vec<Vec<String>>| {
        if let Some(word) = word.take().filter(|_| !std::mem::take(skips)) {
            commands.last_mut().expect("there is one").push(word);
        }
    };
    while let Some(char) = chars.next() {
        match char {
            '\'' | '"' => {
                let word = word.get_or_insert_default();
                while let Some(inner) = chars.next().filter(|inner| *inner != char) {
                    word.push(if inner == '\\' && char == '"' {
                        chars.next().unwrap_or('\\')
                    } else {
                        inner
                    });
                }
            }
            '\\' => word.get_or_insert_default().extend(chars.next()),
            '#' if word.is_none() => break,
            '>' | '<' => {
                // A number before it belongs to it, and what follows is a file.
                word = word.filter(|before| before.parse::<u32>().is_err());
                end_word(&mut word, &mut skips_word, &mut commands);
                while chars.next_if(|next| ['>', '&', ' '].contains(next)).is_some() {}
                skips_word = true;
            }
            '|' | ';' | '&' => {
                end_word(&mut word, &mut skips_word, &mut commands);
                commands.push(Vec::new());
            }
            char if char.is_whitespace() => end_word(&mut word, &mut skips_word, &mut commands),
            char => word.get_or_insert_default().push(char),
        }
    }
    end_word(&mut word, &mut skips_word, &mut commands);
    commands.into_iter().map(without_prefix).filter(|words| !words.is_empty()).collect()
}

/// Leaves out variables and `sudo` before a command.
fn without_prefix(words: Vec<String>) -> Vec<String> {
    let is_variable = |word: &str| {
        word.split_once('=').is_some_and(|(name, _)| {
            !name.is_empty() && name.chars().all(|char| char.is_ascii_uppercase() || char == '_')
        })
    };
    words.into_iter().skip_while(|word| is_variable(word) || word == "sudo").collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        simple(line).into_iter().map(|words| words.join("|")).collect()
    }

    #[test]
    fn a_line_is_split_as_a_shell_does() {
        assert_eq!(words("A_B=1 sudo a 'b c' \"d\\\"e\" f\\ g  # h"), ["a|b c|d\"e|f g"]);
        assert_eq!(words("a > b 2> c < d e &"), ["a|e"]);
        assert_eq!(words("a --b=c 2>&1 | d; e && f"), ["a|--b=c", "d", "e", "f"]);
        assert_eq!(words("a ''"), ["a|"]);
        assert_eq!(words("# a"), [""; 0]);
    }

    #[test]
    fn commands_are_those_of_blocks() {
        let text = "a\n\n    b c \\\n        d\n    b = c\n\n```console\n$ e\nf\n```\n\n        drawing\n\n```toml\n$ g\n```\n";
        let found: Vec<_> =
            commands(text).into_iter().map(|found| (found.line, found.words.join(" "))).collect();
        assert_eq!(found, [(3, "b c d".to_owned()), (8, "e".to_owned())]);
    }
}
