//! The proxy's own answers.

/// Appends an answer with a short text. `to_head` leaves the text out.
pub(crate) fn write(status: u16, text: &str, closes: bool, to_head: bool, out: &mut Vec<u8>) {
    let phrase = phrase(status);
    let body = format!("{status} {phrase}: {text}\n");
    let connection = if closes { "Connection: close\r\n" } else { "" };
    let allow = if status == 405 { "Allow: GET, HEAD, POST, PUT, DELETE, OPTIONS, PATCH\r\n" } else { "" };
    let head = format!(
        "HTTP/1.1 {status} {phrase}\r\nContent-Type: text/plain\r\nContent-Length: {}\r\n{allow}{connection}\r\n",
        body.len()
    );
    out.extend_from_slice(head.as_bytes());
    if !to_head {
        out.extend_from_slice(body.as_bytes());
    }
}

fn phrase(status: u16) -> &'static str {
    match status {
        400 => "Bad Request",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        413 => "Content Too Large",
        414 => "URI Too Long",
        417 => "Expectation Failed",
        431 => "Request Header Fields Too Large",
        501 => "Not Implemented",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        504 => "Gateway Timeout",
        505 => "HTTP Version Not Supported",
        _ => "Error",
    }
}
