//! Every path that a document names is that of a file or folder of the repository.

use std::path::{Component, Path, PathBuf};

use shunt_documents::{files, markdown, read, root};

#[test]
fn each_link_leads_to_a_file_and_a_heading() {
    let mut failures = Vec::new();
    for document in documents() {
        let text = read(&document);
        for (line, text) in markdown::prose(&text) {
            for link in markdown::links(text).into_iter().filter(|link| !link.contains("://")) {
                let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
                let target = if path.is_empty() { document.clone() } else { beside(&document, path) };
                if !root().join(&target).exists() {
                    failures.push(format!("{}:{line}: {link}: no such file", document.display()));
                } else if !anchor.is_empty()
                    && !markdown::anchors(&read(&target)).iter().any(|it| it == anchor)
                {
                    failures.push(format!("{}:{line}: {link}: no such heading", document.display()));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{} links:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn each_page_is_in_an_index() {
    for (folder, index) in [("docs", "docs/SUMMARY.md"), ("docs/adr", "docs/adr/README.md")] {
        let text = read(Path::new(index));
        let listed: Vec<_> =
            markdown::prose(&text).into_iter().flat_map(|(_, line)| markdown::links(line)).collect();
        let pages = documents().into_iter().filter(|page| page.parent() == Some(Path::new(folder)));
        let missing: Vec<_> = pages
            .filter(|page| page != Path::new(index))
            .filter(|page| !listed.iter().any(|link| page.ends_with(link)))
            .collect();
        assert!(missing.is_empty(), "{index} does not list {missing:?}");
    }
}

#[test]
fn each_path_in_code_is_that_of_a_file() {
    let files = files();
    let mut failures = Vec::new();
    for document in documents() {
        let text = read(&document);
        for (line, text) in markdown::prose(&text) {
            let words = markdown::code_spans(text).into_iter().flat_map(str::split_whitespace);
            for path in words.flat_map(braces) {
                if !is_path(&path) || files.iter().any(|file| is_it(file, &path)) {
                    continue;
                }
                failures.push(format!("{}:{line}: `{path}`", document.display()));
            }
        }
    }
    assert!(failures.is_empty(), "{} paths of no file:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn each_document_that_a_comment_names_is_there() {
    let mut failures = Vec::new();
    let sources = files()
        .into_iter()
        .filter(|path| path.extension().is_some_and(|it| it == "rs" || it == "c" || it == "h"));
    for source in sources {
        let text = std::fs::read_to_string(root().join(&source)).unwrap_or_default();
        for (line, text) in text.lines().enumerate() {
            for rest in text.split("docs/").skip(1) {
                let end = rest.find(|char: char| !char.is_alphanumeric() && !"-_./".contains(char));
                let path = rest[..end.unwrap_or(rest.len())].trim_end_matches('.');
                if path.ends_with(".md") && !root().join("docs").join(path).exists() {
                    failures.push(format!("{}:{}: docs/{path}", source.display(), line + 1));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{} documents that are not there:\n{}", failures.len(), failures.join("\n"));
}

/// A test of the dashboard compares its metrics with those that are served.
#[test]
fn each_metric_to_watch_is_in_the_dashboard() {
    let dashboard = read(Path::new("packaging/grafana/shunt.json"));
    let text = read(Path::new("docs/monitor.md"));
    let spans = markdown::prose(&text).into_iter().flat_map(|(_, line)| markdown::code_spans(line));
    let metrics: Vec<_> = spans.filter(|span| span.starts_with("shunt_")).collect();
    assert!(metrics.len() >= 5, "{metrics:?}");
    let missing: Vec<_> = metrics.iter().filter(|metric| !dashboard.contains(**metric)).collect();
    assert!(missing.is_empty(), "the dashboard does not have {missing:?}");
}

/// The folders at the top. Of `debian` documents name those of other packages, too.
const TOPS: [&str; 7] = ["crates", "tests", "docs", "examples", "packaging", "scripts", ".ci"];

/// The documents. A change log names what there was.
fn documents() -> Vec<PathBuf> {
    let is_document = |path: &PathBuf| {
        path.extension().is_some_and(|it| it == "md")
            && path.file_name().is_some_and(|it| it != "CHANGELOG.md")
    };
    files().into_iter().filter(is_document).collect()
}

/// Returns the path of what `link` names in a document.
fn beside(document: &Path, link: &str) -> PathBuf {
    let joined = document.parent().expect("a document is in a folder").join(link);
    let mut plain = PathBuf::new();
    for part in joined.components() {
        match part {
            Component::ParentDir => drop(plain.pop()),
            Component::CurDir => {}
            part => plain.push(part),
        }
    }
    plain
}

/// Returns whether a word is the path of a file of ours: it begins with a folder at the top, or is that of a Rust file.
fn is_path(word: &str) -> bool {
    let is_placeholder = word.contains("NAME") || word.contains(['*', '<', '$', '(', ':', '@', '"']);
    let below_top = word.split_once('/').is_some_and(|(top, rest)| TOPS.contains(&top) && !rest.is_empty());
    !is_placeholder && (below_top || word.ends_with(".rs"))
}

/// Returns whether `path` is `file`, one of its folders, or the end of its path.
fn is_it(file: &Path, path: &str) -> bool {
    let path = path.trim_end_matches('/');
    file.starts_with(path) || file.ends_with(path)
}

/// Expands `a/{b,c}`.
fn braces(word: &str) -> Vec<String> {
    let word = word.trim_matches([',', ';', '.']);
    let Some((before, rest)) = word.split_once('{') else { return vec![word.to_owned()] };
    let Some((inner, after)) = rest.split_once('}') else { return vec![word.to_owned()] };
    inner.split(',').map(|part| format!("{before}{part}{after}")).collect()
}
