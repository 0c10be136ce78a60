# An echo server in Tcl, whose notifier is a thread that waits for all others: echo.tcl PORT

proc ready {stream} {
    set data [read $stream]
    if {[eof $stream]} {
        close $stream
    } else {
        puts -nonewline $stream $data
    }
}

proc accept {stream host port} {
    fconfigure $stream -blocking 0 -translation binary -buffering none
    fileevent $stream readable [list ready $stream]
}

socket -server accept -myaddr 127.0.0.1 [lindex $argv 0]
vwait forever
