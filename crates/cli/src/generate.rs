//! Generates manual pages and completions from the registry in `args`.

mod pages;

use std::fmt::Write;
use std::fs;
use std::io;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use clap::CommandFactory;
use clap_complete::Shell;

use crate::args::Cli;
use pages::{MORE, More};

/// The page that also has the example of shunt.toml(5).
const CONFIGURATION: &str = include_str!("../../../docs/configuration.md");

/// Writes `shunt.1`, one page for each subcommand, and `shunt.toml.5`.
pub(crate) fn man(directory: &Path) -> Result<()> {
    let write = || {
        fs::create_dir_all(directory)?;
        clap_mangen::generate_to(Cli::command(), directory)?;
        for more in MORE {
            let path = directory.join(format!("{}.1", more.page));
            let page = fs::read_to_string(&path)?;
            fs::write(&path, page + &more.roff())?;
        }
        fs::write(directory.join("shunt.toml.5"), configuration())
    };
    write().with_context(|| format!("cannot write manual pages to {}", directory.display()))
}

impl More {
    fn roff(&self) -> String {
        let mut text = String::new();
        if !self.examples.is_empty() {
            text += ".SH EXAMPLES\n";
        }
        for (command, what) in self.examples {
            let _ = write!(text, ".TP\n\\fB{}\\fR\n{}\n", escape(command), escape(what));
        }
        if !self.files.is_empty() {
            text += ".SH FILES\n";
        }
        for (path, what) in self.files {
            let _ = write!(text, ".TP\n\\fI{}\\fR\n{}\n", escape(path), escape(what));
        }
        if !self.see_also.is_empty() {
            let pages = self.see_also.iter().filter_map(|page| page.split_once('('));
            let pages: Vec<String> =
                pages.map(|(name, rest)| format!("\\fB{}\\fR({rest}", escape(name))).collect();
            let _ = write!(text, ".SH SEE ALSO\n{}\n", pages.join(", "));
        }
        text
    }
}

/// Escapes text that does not begin a line of roff with a dot.
fn escape(text: &str) -> String {
    text.replace('\\', "\\e").replace('-', "\\-").replace('\'', "\\(aq")
}

/// Returns shunt.toml(5). Its example is that of docs/configuration.md, which a test compares with
/// the registry of keys.
fn configuration() -> String {
    let example = CONFIGURATION.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next());
    let example: String = example
        .unwrap_or_default()
        .lines()
        .map(|line| match line.starts_with('.') {
            true => format!("\\&{}\n", escape(line)),
            false => escape(line) + "\n",
        })
        .collect();
    let more = More {
        page: "shunt.toml",
        examples: &[
            ("shunt config check FILE", "Say what is wrong with a file."),
            ("shunt config show", "Show what holds, and where each value comes from."),
        ],
        files: &[
            ("/etc/shunt/shunt.toml", "For all users; its [daemon] for the system's broker only."),
            (
                "~/.config/shunt/shunt.toml",
                "For its user, key by key before the system's; its [daemon] for the user's broker.",
            ),
        ],
        see_also: &["shunt(1)", "shunt-run(1)", "shunt-daemon(1)", "shunt-config(1)"],
    };
    format!(
        ".TH shunt.toml 5 \"shunt {version}\"\n\
         .SH NAME\nshunt.toml \\- the configuration of shunt run and of brokers\n\
         .SH DESCRIPTION\n\
         Nothing has to be configured. A file sets the defaults of flags: for every program under shunt, for programs of \
         one name, and for the broker. A flag goes before an environment variable, that before [program.NAME], and that \
         before [run]. A file with an error is rejected as a whole: programs then run on TCP, and a broker does not start.\n\
         .SH KEYS\nAll keys, with examples of values:\n.PP\n.nf\n{example}.fi\n{}",
        more.roff(),
        version = env!("CARGO_PKG_VERSION"),
    )
}

/// Prints the completions of `shell`.
pub(crate) fn completions(shell: Shell) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "shunt", &mut script);
    let script = String::from_utf8(script).context("the completions are no text")?;
    let script = with_programs(shell, script)?;
    io::Write::write_all(&mut io::stdout(), script.as_bytes()).context("the completions cannot be printed")
}

/// In bash, completes programs after `run`, and programs and process ids after `explain`. The
/// generated function knows flags only.
const BASH: &str = r#"
_shunt_programs() {
    _shunt "$@"
    local word="${COMP_WORDS[COMP_CWORD]}" index
    [[ ${COMP_WORDS[1]} == @(run|explain) && $word != -* ]] || return 0
    case ${COMP_WORDS[COMP_CWORD-1]} in
        --transport|--spin|--offer|--own-calls|--ring-memory|--broker|--control) return 0 ;;
    esac
    if [[ ${COMP_WORDS[1]} == explain ]]; then
        COMPREPLY=($(compgen -c -- "$word") $(compgen -W "$(cd /proc && echo [0-9]*)" -- "$word"))
        return 0
    fi
    # The program is the first word that is no flag, and its arguments are often files.
    for ((index = 2; index < COMP_CWORD; index++)); do
        case ${COMP_WORDS[index]} in
            --transport|--spin|--offer|--own-calls|--ring-memory|--broker) ((index++)) ;;
            -*|=) ;;
            *) COMPREPLY=($(compgen -f -- "$word")); return 0 ;;
        esac
    done
    COMPREPLY=($(compgen -c -- "$word"))
}
complete -F _shunt_programs -o nosort -o bashdefault -o default shunt 2>/dev/null ||
    complete -F _shunt_programs -o bashdefault -o default shunt
"#;

const FISH: &str =
    "complete -c shunt -n \"__fish_seen_subcommand_from explain\" -f -a \"(__fish_complete_pids)\"\n";

const ZSH: &str = "
_shunt_explained() {
    _alternative 'processes:process:_pids' 'commands:program:_command_names -e'
}
";

fn with_programs(shell: Shell, script: String) -> Result<String> {
    Ok(match shell {
        Shell::Bash => script + BASH,
        Shell::Fish => script + FISH,
        Shell::Zsh => {
            // The hint of the argument after `explain` is that of programs.
            let (before, after) = script.split_once("(explain)\n").context("zsh: no explain")?;
            let (own, rest) = after.split_once(";;").context("zsh: explain does not end")?;
            ensure!(own.contains(":_command_names -e'"), "zsh: explain takes no program");
            let own = own.replace(":_command_names -e'", ":_shunt_explained'");
            let head = before.split_once('\n').context("zsh: no first line")?;
            format!("{}\n{ZSH}{}(explain)\n{own};;{rest}", head.0, head.1)
        }
        _ => script,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_page_with_more_is_that_of_a_command() {
        let directory = tempfile::tempdir().unwrap();
        man(directory.path()).unwrap();
        let command = Cli::command();
        for subcommand in command.get_subcommands().filter(|one| !one.is_hide_set()) {
            let name = format!("shunt-{}", subcommand.get_name());
            if ["shunt-man", "shunt-completions"].contains(&name.as_str()) {
                continue;
            }
            let page = fs::read_to_string(directory.path().join(format!("{name}.1"))).unwrap();
            for section in [".SH EXAMPLES\n", ".SH SEE ALSO\n"] {
                assert!(page.contains(section), "{name} has no {section}");
            }
        }
        for page in MORE.iter().flat_map(|more| more.see_also).filter(|page| page.starts_with("shunt")) {
            let (name, section) = page.trim_end_matches(')').split_once('(').unwrap();
            assert!(directory.path().join(format!("{name}.{section}")).exists(), "{page}");
        }
        let page = fs::read_to_string(directory.path().join("shunt.toml.5")).unwrap();
        assert!(page.contains("\n[program.postgres] ") && page.contains("ring\\-bytes = 65536"), "{page}");
    }

    fn script(shell: Shell) -> String {
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut Cli::command(), "shunt", &mut script);
        with_programs(shell, String::from_utf8(script).unwrap()).unwrap()
    }

    #[test]
    fn bash_completes_programs_and_processes() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("completions");
        fs::write(&file, script(Shell::Bash)).unwrap();
        let completed = |words: &[&str]| {
            let ask = format!(
                "source {}; COMP_WORDS=({}); COMP_CWORD={}; _shunt_programs shunt '' ''; printf '%s\\n' \"${{COMPREPLY[@]}}\"",
                file.display(),
                words.iter().map(|word| format!("'{word}'")).collect::<Vec<_>>().join(" "),
                words.len() - 1
            );
            let output = std::process::Command::new("bash").args(["-c", &ask]).output().unwrap();
            String::from_utf8(output.stdout).unwrap()
        };
        let has = |words: &[&str], one: &str| completed(words).lines().any(|line| line == one);
        assert!(has(&["shunt", "run", "slee"], "sleep"));
        assert!(has(&["shunt", "run", "--spin", "off", "slee"], "sleep"));
        assert!(!has(&["shunt", "run", "env", "slee"], "sleep"), "it is an argument");
        assert!(has(&["shunt", "explain", "slee"], "sleep"));
        let own = std::process::id().to_string();
        assert!(has(&["shunt", "explain", &own], &own));
        assert!(has(&["shunt", "run", "--sp"], "--spin"), "{}", completed(&["shunt", "run", "--sp"]));
        assert!(has(&["shunt", "expl"], "explain"));
    }

    #[test]
    fn zsh_and_fish_complete_programs_and_processes() {
        let zsh = script(Shell::Zsh);
        assert!(zsh.starts_with("#compdef shunt\n") && zsh.contains(":_shunt_explained'"), "{zsh}");
        assert!(script(Shell::Fish).contains("__fish_complete_pids"));
    }

    #[test]
    fn roff_is_escaped() {
        assert_eq!(escape("a-b 'c' \\d"), "a\\-b \\(aqc\\(aq \\ed");
    }
}
