// An echo server and client in Go. With echo_cgo.go it is linked with libc, and Go's runtime still
// makes inline system calls.
//
//	echo serve PORT
//	echo ask PORT CONNECTIONS MESSAGES GATE
//
// The client repeats its messages until the file GATE exists.
package main

import (
	"bytes"
	"crypto/md5"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"time"
)

const patience = 10 * time.Second

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

func serve(address string) {
	listener, err := net.Listen("tcp", address)
	check(err)
	for {
		connection, err := listener.Accept()
		check(err)
		go func() {
			buffer := make([]byte, 65536)
			for {
				count, err := connection.Read(buffer)
				if err != nil {
					connection.Close()
					return
				}
				connection.Write(buffer[:count])
			}
		}()
	}
}

func ask(address string, connection, messages int, gate string, digests chan<- string) {
	stream, err := net.Dial("tcp", address)
	check(err)
	for isOver := false; !isOver; {
		_, err := os.Stat(gate)
		isOver = err == nil
		digest := md5.New()
		for turn := 0; turn < messages; turn++ {
			message := bytes.Repeat([]byte(fmt.Sprintf("%d.%d some bytes ", connection, turn)), 1+turn*7%97)
			check(stream.SetDeadline(time.Now().Add(patience)))
			_, err := stream.Write(message)
			check(err)
			answer := make([]byte, len(message))
			_, err = io.ReadFull(stream, answer)
			check(err)
			if !bytes.Equal(message, answer) {
				check(fmt.Errorf("connection %d: other bytes came back in turn %d", connection, turn))
			}
			digest.Write(answer)
		}
		if isOver {
			digests <- fmt.Sprintf("%d %x", connection, digest.Sum(nil))
		}
	}
	stream.Close()
}

func main() {
	address := "127.0.0.1:" + os.Args[2]
	if os.Args[1] == "serve" {
		serve(address)
	}
	connections, messages := number(os.Args[3]), number(os.Args[4])
	digests := make(chan string)
	for connection := 0; connection < connections; connection++ {
		go ask(address, connection, messages, os.Args[5], digests)
	}
	all := make(map[string]bool)
	for len(all) < connections {
		all[<-digests] = true
	}
	fmt.Println(all)
}
