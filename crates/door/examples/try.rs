fn main() {
    let a: Vec<String> = std::env::args().collect();
    let go = a[1] == "go";
    let mut child = std::process::Command::new("/bin/sh")
        .arg("-c")
        .arg("read x; exec \"$0\" \"$@\"")
        .args(&a[3..])
        .stdin(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let d = shunt_door::Door::plan(a[3].as_ref(), a[2].as_ref(), go).unwrap();
    shunt_door::wait(child.id() as i32).unwrap();
    use std::io::Write;
    writeln!(child.stdin.take().unwrap(), "x").unwrap();
    println!("{:?}", d.open(child.id() as i32));
    println!("{:?}", child.wait());
}
