// A server that answers each request with the addresses that it sees and the bytes that it
// received. It contains no libc and makes its own system calls. With a third argument it uses
// SO_REUSEPORT.
package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
)

// Linux's SO_REUSEPORT, which package syscall lacks.
const soReusePort = 15

func serve(connection net.Conn) {
	defer connection.Close()
	reader := bufio.NewReader(connection)
	for {
		line, err := reader.ReadString('\n')
		if err != nil {
			return
		}
		words := strings.Fields(line)
		count, err := strconv.Atoi(words[1])
		if err != nil {
			return
		}
		fmt.Fprintf(connection, "%s %s %s\n", words[0], connection.LocalAddr(), connection.RemoteAddr())
		if _, err := io.CopyN(connection, reader, int64(count)); err != nil {
			return
		}
	}
}

func main() {
	var config net.ListenConfig
	if len(os.Args) > 3 {
		config.Control = func(_, _ string, socket syscall.RawConn) (err error) {
			socket.Control(func(fd uintptr) {
				err = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, soReusePort, 1)
			})
			return err
		}
	}
	listener, err := config.Listen(context.Background(), os.Args[1], os.Args[2])
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println("listening")
	for {
		connection, err := listener.Accept()
		if err != nil {
			fmt.Println(err)
			continue
		}
		go serve(connection)
	}
}
