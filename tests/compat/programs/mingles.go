// Connections that Go and C use alternately. The server accepts in Go, and the client connects in
// C. Each passes its connections to the other language.
//
//	mingles serve PORT
//	mingles ask PORT CONNECTIONS GATE
//
// The client repeats its messages until the file GATE exists.
package main

/*
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static int c_connect(int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address)) return -1;
    return fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK) ? -1 : fd;
}

static int c_wait(int fd, short events) {
    struct pollfd one = {fd, events, 0};
    int found;
    while ((found = poll(&one, 1, 10000)) < 0 && errno == EINTR);
    return found;
}

static int c_send(int fd, const char *from, size_t len) {
    while (len > 0) {
        if (c_wait(fd, POLLOUT) != 1) return -1;
        ssize_t sent = send(fd, from, len, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && errno != EAGAIN && errno != EINTR) return -1;
        if (sent > 0) from += sent, len -= sent;
    }
    return 0;
}

static int c_receive(int fd, char *to, size_t len) {
    while (len > 0) {
        if (c_wait(fd, POLLIN) != 1) return -1;
        ssize_t came = recv(fd, to, len, MSG_DONTWAIT);
        if (came == 0 || (came < 0 && errno != EAGAIN && errno != EINTR)) return -1;
        if (came > 0) to += came, len -= came;
    }
    return 0;
}
*/
import "C"

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"runtime/debug"
	"sort"
	"strconv"
	"syscall"
	"time"
	"unsafe"
)

const patience = 20 * time.Second

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func number(word string) int {
	number, err := strconv.Atoi(word)
	check(err)
	return number
}

// A connection of Go's net package, or a file.
type connection interface {
	io.ReadWriteCloser
	SetDeadline(time.Time) error
	SyscallConn() (syscall.RawConn, error)
}

// Sends by C on every other turn, otherwise by Go.
func send(stream connection, turn int, what []byte) {
	if turn%2 == 0 {
		_, err := stream.Write(what)
		check(err)
		return
	}
	raw, err := stream.SyscallConn()
	check(err)
	check(raw.Control(func(fd uintptr) {
		if C.c_send(C.int(fd), (*C.char)(unsafe.Pointer(&what[0])), C.size_t(len(what))) != 0 {
			check(fmt.Errorf("C could not send in turn %d", turn))
		}
	}))
}

func receive(stream connection, turn int, into []byte) error {
	if turn%3 != 0 {
		_, err := io.ReadFull(stream, into)
		return err
	}
	raw, err := stream.SyscallConn()
	check(err)
	var result error
	check(raw.Control(func(fd uintptr) {
		if C.c_receive(C.int(fd), (*C.char)(unsafe.Pointer(&into[0])), C.size_t(len(into))) != 0 {
			result = fmt.Errorf("C could not receive in turn %d", turn)
		}
	}))
	return result
}

// Echoes messages. Each is a length of four bytes and that many bytes.
func serve(stream connection) {
	defer stream.Close()
	for turn := 0; ; turn++ {
		head := make([]byte, 4)
		if _, err := io.ReadFull(stream, head); err != nil {
			return
		}
		body := make([]byte, binary.BigEndian.Uint32(head))
		check(receive(stream, turn, body))
		send(stream, turn, body)
	}
}

// Makes a connection in C. A duplicate descriptor, as net.FileConn makes, would keep it on TCP.
func connect(port int) connection {
	fd := C.c_connect(C.int(port))
	if fd < 0 {
		check(fmt.Errorf("C could not connect"))
	}
	return os.NewFile(uintptr(fd), "connection")
}

func ask(port, client int, gate string, sums chan<- string) {
	stream := connect(port)
	for isOver := false; !isOver; {
		_, err := os.Stat(gate)
		isOver = err == nil
		sum := sha256.New()
		for turn := 0; turn < 60; turn++ {
			body := bytes.Repeat([]byte(fmt.Sprintf("%d.%d ", client, turn)), 1+turn*turn*13%9973)
			check(stream.SetDeadline(time.Now().Add(patience)))
			head := binary.BigEndian.AppendUint32(nil, uint32(len(body)))
			send(stream, turn, append(head, body...))
			back := make([]byte, len(body))
			check(receive(stream, turn+1, back))
			if !bytes.Equal(back, body) {
				check(fmt.Errorf("client %d: other bytes in turn %d", client, turn))
			}
			sum.Write(back)
		}
		if isOver {
			sums <- fmt.Sprintf("%d %x", client, sum.Sum(nil))
		}
	}
	check(stream.Close())
}

func main() {
	debug.SetGCPercent(1)
	go func() {
		for {
			// A loop without calls is preempted by a signal.
			for spins := 0; spins < 1000000; spins++ {
			}
			runtime.GC()
			time.Sleep(time.Millisecond)
		}
	}()
	port := number(os.Args[2])
	if os.Args[1] == "serve" {
		listener, err := net.Listen("tcp", fmt.Sprint("127.0.0.1:", port))
		check(err)
		for {
			stream, err := listener.Accept()
			check(err)
			go serve(stream.(connection))
		}
	}
	clients := number(os.Args[3])
	sums := make(chan string)
	for client := 0; client < clients; client++ {
		go ask(port, client, os.Args[4], sums)
	}
	var all []string
	for len(all) < clients {
		all = append(all, <-sums)
	}
	sort.Strings(all)
	fmt.Println(all)
}
