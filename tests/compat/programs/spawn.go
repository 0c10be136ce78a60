// An echo server and a client, both of which start other programs all the time. One of these is
// this program.
//
//	spawn serve PORT
//	spawn ask PORT CONNECTIONS GATE
//	spawn say WORD
//
// The client repeats its messages until the file GATE exists.
package main

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"time"
)

const patience = 10 * time.Second

// The number of turns between two checks for the file.
const turns = 500

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// Starts other programs, which must print their argument.
func start(turn int) {
	word := fmt.Sprint("word", turn)
	for _, command := range [][]string{{"echo", word}, {os.Args[0], "say", word}} {
		said, err := exec.Command(command[0], command[1:]...).Output()
		check(err)
		if string(said) != word+"\n" {
			check(fmt.Errorf("%v said %q", command, said))
		}
	}
}

func serve(connection net.Conn) {
	buffer := make([]byte, 65536)
	for {
		count, err := connection.Read(buffer)
		if err != nil {
			connection.Close()
			return
		}
		connection.Write(buffer[:count])
	}
}

func ask(address string, connection int, gate string, over chan<- int) {
	stream, err := net.Dial("tcp", address)
	check(err)
	for isOver := false; !isOver; {
		_, err := os.Stat(gate)
		isOver = err == nil
		for turn := 0; turn < turns; turn++ {
			message := bytes.Repeat([]byte(fmt.Sprintf("%d.%d ", connection, turn)), 1+turn*37%997)
			check(stream.SetDeadline(time.Now().Add(patience)))
			_, err := stream.Write(message)
			check(err)
			answer := make([]byte, len(message))
			_, err = io.ReadFull(stream, answer)
			check(err)
			if !bytes.Equal(message, answer) {
				check(fmt.Errorf("connection %d: other bytes came back in turn %d", connection, turn))
			}
		}
	}
	check(stream.Close())
	over <- connection
}

func main() {
	if os.Args[1] == "say" {
		fmt.Println(os.Args[2])
		return
	}
	go func() {
		for turn := 0; ; turn++ {
			start(turn)
		}
	}()
	address := "127.0.0.1:" + os.Args[2]
	if os.Args[1] == "serve" {
		listener, err := net.Listen("tcp", address)
		check(err)
		for {
			connection, err := listener.Accept()
			check(err)
			go serve(connection)
		}
	}
	connections, err := strconv.Atoi(os.Args[3])
	check(err)
	over := make(chan int)
	for connection := 0; connection < connections; connection++ {
		go ask(address, connection, os.Args[4], over)
	}
	for left := connections; left > 0; left-- {
		<-over
	}
	fmt.Println("over")
}
